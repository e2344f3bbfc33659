"""Clusters of real Dask workers, between which there are wires that this machine has not (`limiter.py`)."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

import distributed

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from known import workers_of  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
BINARY = os.environ.get("CUDA_CLUSTER_BIN", str(ROOT / "target/debug/cuda-cluster"))
LIMITER = str(pathlib.Path(__file__).with_name("limiter.py"))
#: Where workers find what they are to run.
PATH = os.pathsep.join(
    [*map(str, (pathlib.Path(__file__).parent, ROOT / "tests/python")), os.environ.get("PYTHONPATH", "")]
)
MACHINE = ("--topology", "dgx-1-v100", "--simulate")

#: What a pair carries, as a share of two NVLinks: by the plan's GB/s for the pair.
SHARES = {40.0: 1.0, 20.0: 0.5, 10.0: 0.1}


def call(*arguments, **variables):
    """What the program prints; its messages are of interest only if it fails."""
    environment = {**os.environ, **variables}
    done = subprocess.run([BINARY, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    return done.stdout


def dgx_1(workers, fastest):
    """The wires of a DGX-1 with V100s in bytes per second, the fastest given: a row a sender."""
    plan = json.loads(call("plan", *MACHINE, "--n-workers", str(workers), "-o", "json"))
    rates, names = plan["engine"]["native"]["gb_per_s"], [one["name"] for one in plan["workers"]]
    share = lambda a, b: None if a == b else fastest * SHARES[rates[a][b]]
    return [[share(sender, receiver) for receiver in names] for sender in names]


def equal(workers, rate):
    return [[None if a == b else rate for b in range(workers)] for a in range(workers)]


def free_ports(count):
    """The first of so many ports in a row that nobody listens on now."""
    for first in range(20_000 + os.getpid() % 200 * 50, 32_000, 50):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise SystemExit(f"no {count} free ports in a row")


@contextlib.contextmanager
def cluster(rows, by_wires=True, told=True, name="wires", config=(), words=()):
    """A client of a cluster with these wires: placed by them or not, the scheduler told of them or not."""
    workers, port = len(rows), free_ports(len(rows))
    name = f"{name}-{os.getpid()}-{port}"
    options = ["--n-workers", str(workers), "--engine", "dask", "--protocol", "tcp", "--no-dashboard"]
    options += ["--scheduler-port", "0", "--worker-port", f"{port}:{port + workers - 1}", "--preload", LIMITER]
    options += ["--python", sys.executable, *words]
    options += ["--place-by-wires" if by_wires else "--no-place-by-wires", "--name", name]
    plan = json.loads(call("plan", *MACHINE, *options, "-o", "json"))
    names = [worker["name"] for worker in plan["workers"]]
    if told and by_wires:
        plan["engine"]["dask"]["gb_per_s"] = {
            a: {b: rate / 1e9 for b, rate in zip(names, row) if rate is not None}
            for a, row in zip(names, rows)
        }
    plan["engine"]["dask"]["config"].update(config)
    with tempfile.TemporaryDirectory() as folder:
        wires, file = os.path.join(folder, "wires.json"), os.path.join(folder, "plan.json")
        with open(wires, "w") as out:
            json.dump({"port": port, "bytes_per_s": rows}, out)
        with open(file, "w") as out:
            json.dump(plan, out)
        call("up", "--plan", file, "--detach", CUDA_CLUSTER_TEST_WIRES=wires, PYTHONPATH=PATH)
        try:
            address = json.loads(call("env", name, "-o", "json"))["env"]["DASK_SCHEDULER_ADDRESS"]
            with distributed.Client(address) as client:
                client.cluster_name = name
                yield client
        finally:
            kept = json.loads(call("ps", name, "-o", "json"))["run_directory"]
            call("down", name)
            # What is known of workers that were killed, as they were to be.
            shutil.rmtree(kept, ignore_errors=True)


def moved(client):
    """So many tasks were placed elsewhere than where Dask would have; None if it places all."""
    return client.run_on_scheduler(_moved)


def _moved(dask_scheduler):
    plugin = dask_scheduler.plugins.get("cuda-cluster-by-wires")
    return plugin.hooks.moved if plugin is not None and plugin.hooks.there else None


async def _fetched(dask_worker, senders, size):
    from cuda_cluster_dask import measure

    done = await measure.measure(dask_worker, senders[dask_worker.address], size, messages=1, rounds=3)
    return min(done["rounds_ns"]) / 1e9


def exactness(client, rows, size=1 << 20):
    """Seconds that a message takes as shares of those that its wire would take, of all pairs, sorted. Each
    worker receives from one other at a time."""
    known = workers_of(client)
    port = min(int(address.rpartition(":")[2]) for address in known)
    by_rank = {int(address.rpartition(":")[2]) - port: address for address in known}
    found = []
    for step in range(1, len(rows)):
        senders = {by_rank[rank]: by_rank[(rank + step) % len(rows)] for rank in by_rank}
        took = client.run(_fetched, senders=senders, size=size)
        for rank, address in by_rank.items():
            found.append(took[address] * rows[(rank + step) % len(rows)][rank] / size)
    return sorted(found)

