"""Jobs of Slurm that are whole machines, which come and go with the work; and what Slurm and the program
say of each end. Slurm is real, on two nodes that are both this machine; the GPUs are made up."""

import json
import re
import sys
import textwrap

import pytest
from test_slurm import job

pytest.importorskip("dask_jobqueue", reason="no dask-jobqueue: scripts/setup.sh --tests")

ADAPTIVE = textwrap.dedent(
    """
    import json, os, subprocess, sys, time
    from cuda_cluster.dask import jobqueue
    from distributed import Client

    jobqueue.LOOK = 0.5
    here = dict(interface="lo", log_directory=os.getcwd(), local_directory=os.getcwd())

    def eventually(holds):
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline, (cluster.job_ends, cluster.observed)
            time.sleep(0.05)

    def jobs_of(client):
        return sorted(set(client.run(lambda: os.environ["SLURM_JOB_ID"]).values()))

    def state(job):
        said = subprocess.check_output(["sacct", "-c", "-n", "-P", "-o", "state", "-j", job], text=True)
        return said.split()

    if __name__ == "__main__":
        found = {}
        cluster = jobqueue.SLURMCluster(gpus=2, walltime="00:10:00", **here)
        with cluster, Client(cluster) as client:
            cluster.adapt(minimum=1, maximum=5, interval="200ms", wait_count=5)
            client.wait_for_workers(2, timeout=120)
            slow = client.map(lambda n: time.sleep(0.2), range(1000), pure=False)
            eventually(lambda: len(cluster.observed) == 4)
            first = client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"].partition(",")[0])
            found["devices"] = sorted(first.values())
            data = client.scatter(list(range(40)))
            both = jobs_of(client)
            client.cancel(slow)
            eventually(lambda: len(cluster.observed) == 2)
            [kept] = jobs_of(client)
            [gone] = set(both) - {kept}
            eventually(lambda: state(gone))
            found["gone"] = state(gone)
            found["kept"] = sum(client.gather(data))
            subprocess.run(["scancel", kept], check=True)
            eventually(lambda: kept in cluster.job_ends)
            eventually(lambda: len(cluster.observed) == 2 and jobs_of(client) != [kept])
            found["cause"] = cluster.job_ends
            found["logged"] = cluster.job_ends[kept] in cluster.get_logs()["Cluster"]
        # One that can't start is told of, and not tried again.
        more = ["--rmm-pool-size", "much"]
        cluster = jobqueue.SLURMCluster(gpus=2, n_workers=2, worker_extra_args=more, **here)
        with cluster:
            eventually(lambda: cluster.job_ends)
            time.sleep(2)
            found["failed"] = list(cluster.job_ends.values())
        print(json.dumps(found))
    """
)


def test_whole_machines_come_and_go_with_the_work_and_why_they_end_is_told(run_in_slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ADAPTIVE)
    found = json.loads(run_in_slurm("python", script).splitlines()[-1])
    assert found["devices"] == ["0", "0", "1", "1"], "of each job two, though the machine has eight"
    assert found["gone"] == ["COMPLETED"], "its workers have handed on what they had, and left"
    assert found["kept"] == sum(range(40))
    [(number, cause)] = found["cause"].items()
    assert re.match(rf"job {number} \(\S+\) on node[01] has ended: CANCELLED .* after 00:0", cause), cause
    assert found["logged"]
    [failed] = found["failed"]
    assert "has ended: FAILED" in failed and "much" in failed, failed


def test_what_a_job_of_whole_machines_is_and_what_is_refused():
    from cuda_cluster.dask.jobqueue import SLURMJob

    def script(**more):
        return SLURMJob("tcp://there:8786", "name", gpus=4, interface="ib0", **more).job_script()

    whole, share = script(), script(cores=8, memory="100GB")
    for line in ("--nodes=1", "--gpus-per-node=4", "--exclusive", "--mem=0", "--cpus-per-task=4"):
        assert f"#SBATCH {line}\n" in whole
    assert "--memory-limit auto" in whole and "trap : TERM" in whole and "cuda_cluster.cli" in whole
    assert "--exclusive" not in share and "#SBATCH --mem=94G\n" in share
    assert "--nthreads 2" in share and "auto" not in share


TOGETHER = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 --no-requeue
exec srun --cpu-bind=none cuda-cluster up --engine dask --join auto --interface lo "$@"
"""

#: Ends the job `$1` in a way, and shows its state as `scontrol` knows it for some minutes, and as
#: `sacct --completion` does where there is no slurmdbd.
END = """
{end}
while squeue -h -j "$1" | grep -q .; do sleep 0.1; done
scontrol show job -o "$1" | grep -o 'JobState=[A-Z_]*'
sacct -c -n -P -o state -j "$1"
"""

#: As an administrator does, or Slurm when a node does not answer.
NODE_FAILS = "scontrol update nodename=node1 state=down reason=test"

READY = """if True:
    import json, os, subprocess
    ps = ["cuda-cluster", "ps", f"job-{os.environ['job']}-0-0", "-o", "json"]
    state = json.loads(subprocess.run(ps, capture_output=True, check=True).stdout)
    assert [one["state"] for one in state["joined"]] == ["ready"] * 2
    print("READY")
"""


#: At a time limit, which has no less than a minute, a step gets it, and again its job.
TWICE = 'scancel --signal=TERM "$1"; sleep 0.5; scancel --signal=TERM "$1"'


@pytest.mark.parametrize(
    "end, state", [('scancel "$1"', "CANCELLED"), (NODE_FAILS, "NODE_FAIL"), (TWICE, "FAILED")]
)
def test_each_end_of_a_job_is_told_as_it_was(end, state, run_in_slurm, tmp_path):
    script, ready, ending, output = (tmp_path / name for name in ("up.sh", "ready.py", "end.sh", "job.log"))
    script.write_text(TOGETHER)
    ready.write_text(READY)
    ending.write_text(END.format(end=end))
    flags = ["--python", sys.executable]
    said = job(run_in_slurm, output, f"bash {ending}", f"python {ready}", script, *flags)
    assert said.split() == ["READY", f"JobState={state}", state], said + output.read_text()
    assert "killing" not in output.read_text(), "SIGTERM is not repeated by somebody who is in a hurry"
    assert not list(tmp_path.glob("cuda-cluster-*.json*")), "the scheduler's file goes with it"
