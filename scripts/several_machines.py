"""From one machine to three, in each one's way: what changes in a script that runs on one machine, and what
is typed; each way is run, and its lines are counted. `several_machines.py [WAY...]`, in a network of its
own and on a made-up machine of two GPUs:

    scripts/own-network.sh scripts/made-up.sh 2 python $PWD/scripts/several_machines.py

The machines are three nodes of a Slurm of this machine (tests/python/slurm.py), and for Ray, which tells
machines apart by their addresses, three networks. The table in configs/several-machines.md is what this
prints. Ends with 1 if a way of ours does not hold.
"""

import difflib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/python"))

import bench_hosts  # noqa: E402
import slurm as real_slurm  # noqa: E402

real_slurm.NODES = ("node0", "node1", "node2")
WORKERS = 6

#: On one machine.
ONE = """
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client

with LocalCUDACluster() as cluster, Client(cluster) as client:
    WORK
"""
ONE_OF_DASK_CUDA = ONE.replace("cuda_cluster.dask", "dask_cuda")
ONE_OF_RAY = """
import ray

ray.init()
WORK
"""

#: What the work sees of the machines.
SEEN = """import json; print(json.dumps(sorted(str(v) for v in client.run(lambda: __import__("os").environ.get("SLURMD_NODENAME")).values())))"""
SEEN_BY_RAY = """import json; print(json.dumps([n["NodeManagerAddress"] for n in ray.nodes() for _ in range(int(n["Resources"].get("GPU", 0)))]))"""

#: Way: the script on one machine and on three, and the files and commands of three.
WAYS = {
    "cuda-cluster": (
        ONE,
        """
from cuda_cluster.dask import SLURMRunner
from distributed import Client

with SLURMRunner(interface="lo") as cluster, Client(cluster) as client:
    WORK
""",
        "",
        "srun --nodes=3 --ntasks-per-node=1 --gpus-per-node=2 python script.py",
    ),
    "cuda-cluster, adaptive": (
        ONE,
        """
from cuda_cluster.dask.jobqueue import SLURMCluster
from distributed import Client

with SLURMCluster(6, gpus=2, walltime="01:00:00", interface="lo") as cluster, Client(cluster) as client:
    client.wait_for_workers(6)
    WORK
""",
        "",
        "python script.py",
    ),
    "dask-cuda": (
        ONE_OF_DASK_CUDA,
        """
from distributed import Client

with Client(scheduler_file="scheduler.json") as client:
    client.wait_for_workers(6)
    WORK
""",
        """
#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=1 --gpus-per-node=2
dask scheduler --interface lo --scheduler-file scheduler.json &
while [ ! -s scheduler.json ]; do sleep 1; done
srun --overlap dask cuda worker --interface lo --scheduler-file scheduler.json &
python script.py
scancel "$SLURM_JOB_ID"
""",
        "sbatch --wait --output=said job.sh",
    ),
    "dask-jobqueue": (
        ONE_OF_DASK_CUDA,
        """
from dask_jobqueue import SLURMCluster
from distributed import Client

with SLURMCluster(
    worker_command="dask_cuda.cli",
    processes=2, cores=2, memory="8GB", walltime="01:00:00", interface="lo",
    job_extra_directives=["--gpus-per-node=2", "--nodes=1", "--exclusive"],
) as cluster, Client(cluster) as client:
    cluster.scale(jobs=3)
    client.wait_for_workers(6)
    WORK
""",
        "",
        "python script.py",
    ),
    "Ray": (
        ONE_OF_RAY,
        ONE_OF_RAY,
        "",
        "ray symmetric-run --address 198.18.251.1:6379 --min-nodes 3 --num-gpus 2 -- python script.py",
    ),
}


def lines(text):
    return [line for line in text.strip().splitlines() if line.strip()]


def changed(before, after):
    """How many lines of a script are new."""
    new = [one for one in difflib.ndiff(lines(before), lines(after)) if one.startswith("+ ")]
    return len(new)


def written(folder, way):
    _, after, job, _ = WAYS[way]
    work = SEEN_BY_RAY if way == "Ray" else SEEN
    (folder / "script.py").write_text(after.replace("WORK", work))
    if job:
        (folder / "job.sh").write_text(job.lstrip())


def by_slurm(way, slurm, folder):
    """What a way of Slurm's prints, and how many processes of jobs are left a moment later."""
    written(folder, way)
    done = subprocess.run(["bash", "-c", WAYS[way][3]], cwd=folder, env=slurm.environment,
                          capture_output=True, text=True, timeout=400)  # fmt: skip
    said = (folder / "said").read_text() if (folder / "said").exists() else ""
    deadline = time.monotonic() + 20
    while slurm.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    if left := slurm.processes():
        print(f"{way} has left: {left}", file=sys.stderr)
    return done.stdout + said, done.stderr, len(left)


#: With processes and a folder of Ray's of its own, as a machine has.
OF_ITS_OWN = 'mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; exec "$@"'


def inside(host):
    return ["nsenter", "--net", "--target", str(host)]


def by_ray(folder):
    """The same of Ray's, on three networks."""
    written(folder, "Ray")
    mark = f"several-{os.getpid()}"
    apart = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", OF_ITS_OWN]
    with bench_hosts.networks(3) as hosts:
        # Its connections would go to a proxy.
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        # All machines would need the token that the first makes.
        environment |= {"BENCH_MARK": mark, "RAY_AUTH_MODE": "disabled"}
        options = dict(cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started = []
        for host in hosts:
            # Ray takes for a machine's address what it would send from to somewhere else.
            subprocess.run([*inside(host), "ip", "route", "add", "default", "dev", "far"], check=True)
        for host in hosts:
            command = [*inside(host), *apart, "sh", *WAYS["Ray"][3].split()]
            started.append(subprocess.Popen(command, **options))
        try:
            said = [one.communicate(timeout=300)[0] for one in started]
        finally:
            for one in started:
                one.kill()
        time.sleep(20)
        return "\n".join(said), "", len(bench_hosts.marked(mark))


def main(ways):
    failed = False
    print("| way | of the script new | job script | commands | machines' workers | left after the end |")
    print("|---|---|---|---|---|---|")
    with real_slurm.Slurm(2) as slurm:
        for way, (before, after, job, commands) in ways.items():
            with tempfile.TemporaryDirectory(prefix="sm", dir="/tmp") as folder:
                folder = Path(folder)
                said, errors, left = by_ray(folder) if way == "Ray" else by_slurm(way, slurm, folder)
            seen = [json.loads(line) for line in said.splitlines() if line.startswith('["')]
            is_right = len(seen) == 1 and len(seen[0]) == WORKERS and len(set(seen[0])) == 3
            if not is_right:
                print(f"{way}: {seen}\n{said[-2000:]}\n{errors[-3000:]}", file=sys.stderr)
                failed |= way.startswith("cuda-cluster")
            numbers = f"{changed(before, after)} lines | {len(lines(job))} lines | {len(lines(commands))}"
            how = "2 on each of 3" if is_right else "not seen"
            print(f"| {way} | {numbers} | {how} | {left} processes |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    # What was started ends with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main({way: what for way, what in WAYS.items() if way in (sys.argv[1:] or WAYS)})
