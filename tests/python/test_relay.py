"""What workers print is seen where their cluster was started."""

import subprocess
import sys
import tempfile

import pytest
from conftest import MACHINE

#: A program with a task that prints, and one that fails.
PRINTS = """
import sys
from {module} import {name} as Cluster
from distributed import Client

def work(n):
    print("printed by a task")
    print("told by a task", file=sys.stderr)
    # As a task's own logger with a common format says it.
    print("2026-01-31 12:00:00,000 - my.app - INFO - epoch 1", file=sys.stderr)
    return 1 // n

if __name__ == "__main__":
    with Cluster(**{kwargs!r}) as cluster, Client(cluster) as client:
        assert client.submit(work, 1).result() == 1
        assert isinstance(client.submit(work, 0).exception(), ZeroDivisionError)
"""

#: One whose scaling says that it begins.
ADAPTS = """
from {module} import {name} as Cluster

if __name__ == "__main__":
    with Cluster(**{kwargs!r}) as cluster:
        cluster.adapt(minimum=1, maximum=1)
"""

#: A program with a task in whose process Python itself complains, in the words that it has for that.
COMPLAINS = """
from {module} import {name} as Cluster
from distributed import Client

class Thrower:
    def __del__(self):
        raise OSError("thrown by a finalizer")

def complain():
    import asyncio, gc, threading

    async def fail():
        raise OSError("thrown by a coroutine")

    async def forget():
        asyncio.ensure_future(fail())
        await asyncio.sleep(0)

    Thrower()
    asyncio.run(forget())
    gc.collect()
    thread = threading.Thread(target=lambda: 1 // 0)
    thread.start()
    thread.join()
    print("printed by a task")

if __name__ == "__main__":
    with Cluster(**{kwargs!r}) as cluster, Client(cluster) as client:
        client.submit(complain).result()
        # The second shows that the first was passed on to its end.
        client.submit(print, "and by another").result()
"""

#: A program with a task that needs more memory than its worker may have, and workers that end as asked.
FILLS = """
import time
from {module} import {name} as Cluster
from distributed import Client, KilledWorker

def fill():
    held = bytearray(2_000_000_000)
    for page in range(0, len(held), 4096):
        held[page] = 1
    time.sleep(600)

if __name__ == "__main__":
    with Cluster(**{kwargs!r}) as cluster, Client(cluster) as client:
        assert isinstance(client.submit(fill).exception(), KilledWorker)
        client.wait_for_workers(2)
        print("a new page begins", flush=True)
        client.restart()
        cluster.scale(1)
        while len(cluster.scheduler_info["workers"]) > 1:
            time.sleep(0.05)
"""


#: The same, with workers that join a scheduler.
JOINS = """
import asyncio
from cuda_cluster.dask import CUDAWorker
from distributed import Client, Scheduler

def work():
    print("printed by a task")
    return 1 // 0

async def main():
    async with Scheduler(dashboard=False, host="127.0.0.1", port=0) as scheduler:
        async with CUDAWorker(scheduler.address, **{kwargs!r}):
            async with Client(scheduler.address, asynchronous=True) as client:
                assert isinstance(await client.submit(work).exception(), ZeroDivisionError)

if __name__ == "__main__":
    asyncio.run(main())
"""


def printed(kwargs, module="cuda_cluster.dask", name="LocalCUDACluster", program=PRINTS):
    """What such a program shows: on standard output, and on standard error."""
    script = program.format(module=module, name=name, kwargs=kwargs)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        done = subprocess.run([sys.executable, file.name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.usefixtures("nothing_is_left")
def test_what_workers_print_is_seen_as_with_a_local_cluster():
    kwargs = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None, "protocol": "tcp"}
    ours, theirs = {**MACHINE, **kwargs}, {**kwargs, "dashboard_address": ":0"}
    for program in (printed(ours), printed(theirs, "distributed", "LocalCluster")):
        out, err = program
        assert out.count("printed by a task") == 2
        assert (out + err).count("told by a task") == 2
        assert "Compute Failed" in err and "ZeroDivisionError" in err
        assert (out + err).count(" - my.app - INFO - epoch 1") == 2
        assert "INFO" not in (out + err).replace(" - my.app - INFO - epoch 1", "")
    # Loggers of this process, too.
    said = "distributed.deploy.adaptive - INFO"
    assert said not in printed(ours, program=ADAPTS)[1]
    assert said in printed({**ours, "silence_logs": False}, program=ADAPTS)[1]
    out, err = printed({**ours, "silence_logs": "critical"})
    assert out.count("printed by a task") == 2 and "Compute Failed" not in out + err
    assert "ZeroDivisionError" not in out + err
    out, err = printed({**ours, "silence_logs": False})
    assert out.count("printed by a task") == 2 and "INFO" in err
    assert printed({**ours, "relay": False}) == ("", "")


@pytest.mark.usefixtures("nothing_is_left")
def test_what_python_complains_of_in_a_worker_is_no_output_of_its_tasks():
    kwargs = {**MACHINE, "n_workers": 1, "dashboard_address": None, "protocol": "tcp"}
    out, err = printed(kwargs, program=COMPLAINS)
    assert out.splitlines() == ["printed by a task", "and by another"], out
    for cause in ("by a finalizer", "by a coroutine", "ZeroDivisionError"):
        assert cause in err and err.count("Traceback (most recent call last):") == 3


# Without that check: the files of a cluster whose workers died are kept.
def test_a_worker_that_was_ended_for_its_memory_is_told_and_one_that_ended_as_asked_is_not():
    kwargs = {**MACHINE, "n_workers": 2, "dashboard_address": None, "protocol": "tcp",
              "memory_limit": "500MB"}  # fmt: skip
    _, err = printed(kwargs, program=FILLS)
    told = [line for line in err.splitlines() if " - cuda_cluster - " in line]
    assert len(told) == 4, err
    for line in told:
        assert "WARNING - gpu" in line and "memory limit of 500 MB" in line and "SIGKILL" in line
    _, err = printed({**kwargs, "silence_logs": "error"}, program=FILLS)
    assert " - cuda_cluster - " not in err


@pytest.mark.usefixtures("nothing_is_left")
def test_what_workers_that_join_a_scheduler_print_is_seen_too():
    kwargs = {**MACHINE, "gpus": "0"}
    out, err = printed(kwargs, program=JOINS)
    assert out.count("printed by a task") == 1
    assert "Compute Failed" in err and "ZeroDivisionError" in err
    out, err = printed({**kwargs, "relay": False}, program=JOINS)
    assert "printed by a task" not in out and "Compute Failed" not in err
