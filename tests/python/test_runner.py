"""One script that Slurm or MPI starts once on each machine: the first goes on with the workers of all,
and all end with it. Slurm is real, on two nodes that are both this machine; MPI's second machine is
this one, too."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from conftest import BUILT, RUNTIME

#: What a user writes; the rest is what this machine needs, and what the test looks at.
SCRIPT = textwrap.dedent(
    """
    import json, os, sys
    from cuda_cluster.dask import {runner}
    from distributed import Client

    print("in the script", flush=True)
    with {runner}(interface="lo", {more}) as runner, Client(runner) as client:
        where = client.run(lambda: os.environ.get("SLURMD_NODENAME"))
        found = {{
            "workers": [len(where), runner.n_workers, runner.world_size],
            "nodes": sorted(map(str, where.values())),
            "devices": sorted(client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).values()),
            "sum": client.submit(sum, range(10)).result(),
        }}
        print(json.dumps(found), flush=True)
        {body}
    print("after the cluster", flush=True)
    """
)

SRUN = ["srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--cpu-bind=none"]


@pytest.fixture
def script(tmp_path):
    def write(body="pass", runner="SLURMRunner", more=""):
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(runner=runner, body=body, more=more))
        return path

    return write


def left(folder):
    """What is left where the processes met, and of their clusters."""
    return sorted(map(str, [*folder.glob("*.json*"), *folder.glob("cuda-cluster/*")]))


def test_srun_starts_a_script_whose_body_runs_once_with_the_workers_of_all_nodes(
    run_in_slurm, script, tmp_path
):
    said = run_in_slurm(*SRUN, "python", script())
    assert said.count("in the script") == 2
    assert said.count("after the cluster") == 1, "only in the first process"
    [found] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert found == {
        "workers": [4, 4, 2],
        "nodes": ["node0", "node0", "node1", "node1"],
        "devices": ["0,1", "0,1", "1,0", "1,0"],
        "sum": 45,
    }
    assert not left(tmp_path)


@pytest.mark.parametrize("body, status", [("raise SystemExit(7)", 7), ("raise ValueError('mine')", 1)])
def test_the_scripts_failure_is_the_steps(body, status, run_in_slurm, script, tmp_path):
    found, said = run_in_slurm(*SRUN, "python", script(body), asked=True)
    assert found == status, said
    assert said.count("Exited with exit code") == 1, "the other process ends well"
    assert not left(tmp_path)


def test_one_machine_that_cannot_start_ends_all_with_its_cause(run_in_slurm, script, tmp_path):
    # The second node's process sees a GPU that is not there.
    more = "gpus='9' if os.environ['SLURM_PROCID'] == '1' else None"
    found, said = run_in_slurm(*SRUN, "python", script(more=more), asked=True)
    assert found != 0
    assert "process 1 of 2" in said and "could not start its workers" in said, said
    assert "after the cluster" not in said
    assert not left(tmp_path)


def test_scancel_ends_all_in_order(run_in_slurm, slurm, script, tmp_path):
    waits = "open('going', 'w').close(); import time; time.sleep(600)"
    path = script(waits)
    command = " ".join([*SRUN, sys.executable, str(path)])
    shell = f"""
        job=$(sbatch --parsable --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 \
            --output=said.log --wrap '{command}')
        while [ ! -e going ] && squeue -h -j $job | grep -q .; do sleep 0.2; done
        scancel $job
        while squeue -h -j $job | grep -q .; do sleep 0.1; done
        scontrol show job -o $job
        # Slurm does not wait for what tidies up after a Python that is gone.
        for i in $(seq 100); do
            left=$(ls "${{XDG_RUNTIME_DIR:-/none}}/cuda-cluster" 2>/dev/null)
            [ -n "$left" ] || break
            sleep 0.1
        done
        echo "left: $left, after $i looks"
    """
    said = run_in_slurm("bash", "-c", shell)
    log = (tmp_path / "said.log").read_text()
    assert "JobState=CANCELLED" in said, said + log
    assert "left: , after" in said, "no run directory is left: " + said
    assert not left(tmp_path), log


#: `mpiexec` starts processes on other machines with it; here it starts them on this one.
ELSEWHERE = """#!/bin/sh
# Arguments are options of ssh's, a host, and a command.
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""


@pytest.fixture
def by_mpiexec(made_up_machine, tmp_path):
    """Runs a script in so many processes of MPICH's; returns what it said, and its lines of JSON."""
    mpiexec = shutil.which("mpiexec.hydra")
    if mpiexec is None:
        pytest.skip("no MPICH: scripts/setup.sh --tests")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(ELSEWHERE)
    elsewhere.chmod(0o755)

    def run(script, processes, hosts):
        command = [*made_up_machine(2), "env", "-C", str(tmp_path), mpiexec, "-iface", "lo"]
        command += ["-launcher", "ssh", "-launcher-exec", str(elsewhere), "-hosts", ",".join(hosts)]
        command += ["-n", str(processes), sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return done.stdout + done.stderr, lines

    return run


def test_mpiexec_starts_a_script_likewise(by_mpiexec, script, tmp_path):
    # Both have the same GPUs here.
    one = "gpus=os.environ['PMI_RANK']"
    said, [found] = by_mpiexec(script(runner="MPIRunner", more=one), 2, ["machine-a:1", "machine-b:1"])
    assert found["workers"] == [2, 2, 2] and found["sum"] == 45
    assert found["devices"] == ["0", "1"]
    assert said.count("after the cluster") == 1
    assert not left(tmp_path)


DASK_MPI = """
import json, os
import dask_mpi
from distributed import Client
from mpi4py import MPI

# Both have the same GPUs here.
one = {"gpus": str(MPI.COMM_WORLD.Get_rank() % 2)}
dask_mpi.initialize(
    worker_class="cuda_cluster.dask.CUDAWorker", interface="lo", dashboard=False, worker_options=one
)
with Client() as client:
    client.wait_for_workers(2, timeout=120)
    devices = client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    print(json.dumps({"devices": sorted(devices.values())}), flush=True)
"""


def test_dask_mpis_processes_run_our_workers(by_mpiexec, tmp_path):
    pytest.importorskip("dask_mpi", reason="no dask-mpi: scripts/setup.sh --tests")
    script = tmp_path / "script.py"
    script.write_text(DASK_MPI)
    # A scheduler, a client, and two machines.
    _, [found] = by_mpiexec(script, 4, ["machine-a:4"])
    assert found == {"devices": ["0", "1"]}


def test_several_processes_of_one_machine_and_none_are_refused(tmp_path, script):
    environment = {**os.environ, "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
                   "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
                   "CUDA_CLUSTER_BIN": str(BUILT), "XDG_RUNTIME_DIR": RUNTIME}  # fmt: skip
    command = [sys.executable, str(script(more="topology='dgx-h100', simulate=True"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "this is one of 2 tasks of this machine, which would share its GPUs" in done.stderr
    alone = {name: value for name, value in environment.items() if not name.startswith("SLURM")}
    done = subprocess.run(command, capture_output=True, text=True, env=alone, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "nothing says which of several processes this is" in done.stderr
    assert not left(tmp_path)


IN_A_LOOP = """
import asyncio, json
from cuda_cluster.dask import Runner
from distributed import Client

async def main():
    asked = dict(topology="dgx-h100", simulate=True, interface="lo", ready_within="10m")
    async with Runner(asynchronous=True, n_workers=1, **asked) as runner:
        async with Client(runner, asynchronous=True) as client:
            print(json.dumps({"sum": await client.submit(sum, range(10)), "workers": runner.n_workers}))

asyncio.run(main())
"""


def test_in_an_event_loop_it_is_awaited_and_the_others_end_likewise(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_A_LOOP)
    flux = {"FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": f"t{os.getpid()}"}
    options = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**os.environ, **flux, "FLUX_TASK_RANK": rank}, **options
        )
        for rank in "01"
    ]
    said = [one.communicate(timeout=300) for one in started]
    assert [one.returncode for one in started] == [0, 0], said
    assert json.loads(said[0][0]) == {"sum": 45, "workers": 2}
    assert not said[1][0], "its script does not go on"
    assert not left(tmp_path)
