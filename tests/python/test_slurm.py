"""Jobs of Slurm: workers of dask-jobqueue, and the scripts of `configs/`. Slurm is real, on two nodes
that are both this machine; the GPUs are made up."""

import json
import re
import sys
import textwrap

import pytest
import slurm as stand_in
from conftest import ROOT


@pytest.fixture
def run(run_in_slurm):
    return run_in_slurm


#: What a user of dask-jobqueue does. The cluster is that of the guide, with what this machine needs.
GUIDE = (ROOT / "configs/from-dask-cuda.md").read_text()
[RECIPE] = re.findall(r"```python\n(SLURMCluster\(.*?)```", GUIDE, re.S)
JOBQUEUE = textwrap.dedent(
    """
    import functools, json, os, sys, time
    import dask_jobqueue
    from distributed import Client

    SLURMCluster = functools.partial(
        dask_jobqueue.SLURMCluster, walltime="00:10:00", interface="lo", python=sys.executable,
        log_directory=sys.argv[1], local_directory=sys.argv[1],
        worker_extra_args=["--resources", "GPU=1"],
    )

    def eventually(holds):
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    if __name__ == "__main__":
        cluster = eval(sys.argv[2])
        with cluster, Client(cluster) as client:
            cluster.scale(jobs=1)
            client.wait_for_workers(2, timeout=120)
            workers = client.scheduler_info(n_workers=-1)["workers"].values()
            found = {
                "names": sorted(worker["name"] for worker in workers),
                "workers": [[worker[what] for what in ("nthreads", "memory_limit", "resources")]
                            for worker in workers],
                "devices": sorted(client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).values()),
                "jobs": len(set(client.run(lambda: os.environ["SLURM_JOB_ID"]).values())),
            }
            cluster.scale(jobs=2)
            client.wait_for_workers(4, timeout=120)
            data = client.scatter(list(range(40)))
            cluster.scale(jobs=1)
            eventually(lambda: len(cluster.observed) == 2)
            found["data"] = sum(client.gather(data))
            cluster.adapt(minimum_jobs=1, maximum_jobs=2, interval="200ms", wait_count=10)
            slow = client.map(lambda n: time.sleep(0.2), range(1000), pure=False)
            eventually(lambda: len(cluster.observed) == 4)
            client.cancel(slow)
            eventually(lambda: len(cluster.observed) == 2)
            found["kept"] = sum(client.gather(data))
            found["same"] = cluster.plan == cluster.requested == cluster.observed
        print(json.dumps(found))
    """
)


def test_jobqueue_starts_scales_and_ends_our_workers(run, tmp_path):
    pytest.importorskip("dask_jobqueue", reason="no dask-jobqueue: scripts/setup.sh --tests")
    script = tmp_path / "script.py"
    script.write_text(JOBQUEUE)
    found = json.loads(run("python", script, tmp_path, RECIPE).splitlines()[-1])
    memory = found["workers"][0][1]
    assert 1e9 < memory <= 32e9
    assert found == {
        "names": ["SLURMCluster-0-0", "SLURMCluster-0-1"],
        "workers": [[1, memory, {"GPU": 1.0}]] * 2,
        "devices": ["0,1", "1,0"],
        "jobs": 1,
        "data": sum(range(40)),
        "kept": sum(range(40)),
        "same": True,
    }


#: Submits a job, waits until a test's check succeeds, ends the job, and shows what the check printed.
JOB = textwrap.dedent(
    """
    set -euo pipefail
    output=$1 end=$2 holds=$3
    shift 3
    job=$(sbatch --parsable --output="$output" "$@")
    export job
    for _ in $(seq 600); do
        [ -z "$(squeue -h -j "$job" 2>/dev/null)" ] && break
        if seen=$(bash -c "$holds" 2>/dev/null); then break; fi
        sleep 0.2
    done
    echo "$seen"
    $end "$job"
    while [ -n "$(squeue -h -j "$job" 2>/dev/null)" ]; do sleep 0.1; done
    """
)


#: What Slurm does a minute before the time limit, for `--signal=TERM@60`.
TIME_LIMIT = "scancel --signal=TERM"


def job(run, output, end, holds, *arguments, **more):
    """What a test's check has printed while a job ran."""
    try:
        return run("bash", "-c", JOB, "job", output, end, holds, *arguments, **more)
    except AssertionError as error:
        said = output.read_text() if output.exists() else "the job has said nothing"
        raise AssertionError(f"{error}\n{said}") from None


def test_the_script_for_one_node_runs_a_cluster_on_the_jobs_gpus(run, tmp_path):
    ready = "import json, sys; s = json.load(sys.stdin); print(json.dumps(s)); assert s['state'] == 'ready'"
    holds = f'cuda-cluster ps "job-$job" -o json | python -c "{ready}"'
    output = tmp_path / "job.log"
    script = ROOT / "configs/cuda-cluster.slurm"
    found = job(run, output, TIME_LIMIT, holds, "--gpus-per-node=2", script)
    state = json.loads(found)
    assert state["state"] == "ready", output.read_text()
    assert [worker["gpu"]["index"] for worker in state["workers"]] == [0, 1]
    assert "cluster: stopped" in output.read_text()


#: A step in which all tasks run the same command, and the job's state in Slurm's accounts.
TOGETHER = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=2
exec srun --cpu-bind=none cuda-cluster up --engine dask --join auto --interface lo "$@"
"""


@pytest.mark.parametrize("end", ["scancel", TIME_LIMIT])
def test_one_command_for_all_nodes_makes_one_cluster_which_the_first_shows(end, run, tmp_path):
    script = tmp_path / "together.sh"
    script.write_text(TOGETHER)
    look = tmp_path / "look.py"
    look.write_text(
        """if True:
        import glob, json, os, subprocess, sys
        from distributed import Client
        job = os.environ["job"]
        [file] = glob.glob(f"cuda-cluster-{job}-*.json")
        with Client(scheduler_file=file) as client:
            client.wait_for_workers(4, timeout=60)
            nodes = client.run(lambda: os.environ["SLURMD_NODENAME"])
        ps = ["cuda-cluster", "ps", f"job-{job}-0-0", "-o", "json"]
        state = json.loads(subprocess.run(ps, capture_output=True, check=True).stdout)
        joined = [[one["cluster"] == f"job-{job}-0-1", one["gpu"], one["state"]] for one in state["joined"]]
        print(json.dumps([sorted(nodes.values()), sorted(joined)]))
        """
    )
    output = tmp_path / "job.log"
    holds = f"ls cuda-cluster-$job-*.json && python {look}"
    found = job(run, output, end, holds, script, "--python", sys.executable)
    nodes = [name for name in stand_in.NODES for _ in range(2)]
    joined = [[True, gpu, "ready"] for gpu in range(2)]
    assert json.loads(found.splitlines()[-1]) == [nodes, joined]
    assert not list(tmp_path.glob("cuda-cluster-*.json")), "the scheduler's file goes with it"
    assert output.read_text().count("cluster: stopped") == 2


def test_a_batch_script_is_no_task_and_several_tasks_of_a_node_are_refused(run, tmp_path):
    up = "cuda-cluster up --engine dask --join auto --dry-run"
    said = run("sbatch", "--wait", "--nodes=2", f"--output={tmp_path}/said.txt", "--wrap", f"{up}; true")
    assert "Submitted" in said
    assert "not a task of the job, but its script" in (tmp_path / "said.txt").read_text()
    said = run("bash", "-c", f"srun --nodes=1 --ntasks=2 --overcommit {up} 2>&1 || true")
    assert said.count("one of 2 tasks of this machine, which would share its GPUs") == 2


@pytest.mark.parametrize("end", ["scancel", TIME_LIMIT])
def test_the_script_for_several_nodes_runs_one_dask_cluster(end, run, tmp_path):
    file = tmp_path / "scheduler.json"
    look = tmp_path / "look.py"
    look.write_text(
        f"""if True:
        import json, os
        from distributed import Client
        with Client(scheduler_file={str(file)!r}) as client:
            client.wait_for_workers(4, timeout=60)
            nodes = client.run(lambda: (os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"]))
        print(json.dumps(sorted(nodes.values())))
        """
    )
    holds = f"test -s {file} && python {look}"
    output = tmp_path / "job.log"
    more = {"INTERFACE": "lo", "SCHEDULER_FILE": str(file)}
    flags = ["--python", sys.executable]
    script = ROOT / "configs/dask-multi-node.slurm"
    found = job(run, output, end, holds, "--gpus-per-node=2", script, *flags, **more)
    devices = [[node, mask] for node in stand_in.NODES for mask in ("0,1", "1,0")]
    assert json.loads(found.splitlines()[-1]) == devices
    assert not file.exists(), "the scheduler's file goes with it"
    assert output.read_text().count("cluster: stopped") == 2


def test_exec_binds_the_tasks_that_srun_starts(run):
    show = """
        import json, os
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
        print(json.dumps([os.environ.get(name) for name in names] + [bool(os.environ["MASTER_ADDR"])]))
    """
    said = run("srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "cuda-cluster",
               "exec", "--", "python", "-c", textwrap.dedent(show))  # fmt: skip
    found = sorted(json.loads(line) for line in said.splitlines())
    assert found == [[str(rank), str(rank % 2), "4", "2", "0,1", True] for rank in range(4)]
