"""`LocalCUDACluster` ends with its Python, however that ends, and leaves nothing."""

import asyncio
import gc
import glob
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import cuda_cluster
import pytest
from conftest import MACHINE, QUIET, ROOT, RUNTIME, eventually, files, others
from cuda_cluster.dask import CUDAWorker, LocalCUDACluster
from distributed import Client, Event
from distributed.core import Status
from distributed.scheduler import WorkerStatusPlugin

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_the_asynchronous_way():
    async def story():
        async with LocalCUDACluster(**QUIET, n_workers=1, asynchronous=True) as cluster:
            async with Client(cluster, asynchronous=True) as client:
                assert await client.submit(sum, [1, 2]) == 3
                cluster.scale(1)
        assert cluster.status == Status.closed
        cluster = await LocalCUDACluster(**QUIET, n_workers=1, asynchronous=True)
        await cluster.close()
        await cluster.close()

    asyncio.run(story())


def test_client_shutdown_ends_it():
    cluster = LocalCUDACluster(**QUIET, n_workers=1)
    client = Client(cluster)
    client.shutdown()
    assert cluster.status == Status.closed
    cluster.close()


def test_a_shutdown_by_somebody_else_closes_it():
    with LocalCUDACluster(**QUIET, n_workers=1) as cluster:
        with Client(cluster.scheduler_address) as client:
            client.shutdown()
        eventually(lambda: cluster.status == Status.closed, "it knows")


def test_a_worker_that_leaves_without_having_come_stops_nothing():
    def leave(dask_scheduler):
        for plugin in dask_scheduler.plugins.values():
            if isinstance(plugin, WorkerStatusPlugin):
                plugin.remove_worker(dask_scheduler, "tcp://127.0.0.1:9")

    with LocalCUDACluster(**QUIET, n_workers=2) as cluster, Client(cluster) as client:
        client.run_on_scheduler(leave)
        cluster.scale(1)
        eventually(lambda: len(cluster.scheduler_info["workers"]) == 1, "it still follows")


def test_two_at_once_in_one_python():
    with LocalCUDACluster(**QUIET, n_workers=1) as first:
        with LocalCUDACluster(**QUIET, n_workers=2) as second:
            assert first.scheduler_address != second.scheduler_address
            with Client(first) as one, Client(second) as two:
                assert len(one.run(os.getpid)) == 1 and len(two.run(os.getpid)) == 2


def test_twenty_clusters_one_after_the_other_leave_nothing():
    def held():
        gc.collect()
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())],
                                  capture_output=True, text=True).stdout.split()  # fmt: skip
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)

    def one():
        with LocalCUDACluster(**QUIET, n_workers=1) as cluster, Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3

    one()
    before, on_disk, processes = held(), files(), set(others())
    for _ in range(19):
        one()
        assert files() <= on_disk, "gone when it is closed"
    eventually(lambda: set(others()) <= processes, "no process is left", 30)
    nothing_more = lambda: all(now <= then for now, then in zip(held(), before))
    eventually(nothing_more, f"descriptors, threads, children: {held()}, before {before}", 30)


def test_a_task_that_runs_does_not_hold_the_end_up_until_its_worker_is_killed():
    cluster = LocalCUDACluster(**QUIET, n_workers=2)
    happened = []
    cluster._owned.subscribe(happened.append)
    with Client(cluster) as client:
        began = Event("began", client=client)
        client.submit(lambda: Event("began").set() or time.sleep(600))
        began.wait(60)
        cluster.close()
    known = {(one.event, one.process) for one in happened if one is not None}
    assert {("exited", "gpu0"), ("exited", "gpu1")} <= known
    assert "killed" not in {event for event, _ in known}


def test_it_outlives_the_thread_that_made_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(LocalCUDACluster(**QUIET, n_workers=1)))
    thread.start()
    thread.join()
    with made[0] as cluster, Client(cluster) as client:
        time.sleep(0.5)
        assert client.submit(sum, [1, 2]).result() == 3


#: How a Python ends that has a cluster: what it does, and its exit status; None for any.
WAYS = {
    "it returns": ("pass", 0),
    "it raises": ("1 / 0", 1),
    "os._exit": ("os._exit(7)", 7),
    "os._exit in a thread": ("threading.Thread(target=os._exit, args=(7,)).start(); time.sleep(60)", 7),
    "sys.exit in a thread": ("threading.Thread(target=sys.exit).start()", 0),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
    "another program": ("os.execvp('true', ['true'])", 0),
    "a child that lives on": ("os.fork() or os.execvp('sleep', ['sleep', '30'])", 0),
    "os._exit beside a child": ("os.fork() and os._exit(7); time.sleep(30)", 7),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_ends_with_its_python(way, tmp_path, monkeypatch):
    ends, status = WAYS[way]
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys, threading, time
            from cuda_cluster.dask import LocalCUDACluster
            from distributed import Client
            if __name__ == "__main__":
                # Tests that run in the background have inherited a Ctrl-C that is ignored.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                cluster = LocalCUDACluster(**{QUIET!r}, n_workers=1, security=True)
                client = Client(cluster)
                print(client.submit(sum, [1, 2]).result(), flush=True)
                {ends}
            """
        )
    )
    with open(tmp_path / "output", "w+") as output:
        # Not a pipe, which a child would hold open.
        done = subprocess.Popen([sys.executable, script], stdout=output, stderr=output,
                                start_new_session=True)  # fmt: skip
        done.wait(300)
        output.seek(0)
        said = output.read()
    assert done.returncode == status and said.startswith("3\n"), said
    assert said == "3\n" or way != "it returns", "a quiet end"
    owned = lambda: [one for one in others() if str(script) not in one[1]]
    eventually(lambda: not owned(), f"the cluster has ended: {owned()}")
    eventually(lambda: not files(), f"nothing is left: {files()}")
    assert not list(temporary.rglob("*.pem")), "no private key either"
    try:
        os.killpg(done.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # No child lives on.


def test_a_python_that_ignores_the_ends_of_its_children_has_a_cluster(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import signal
            from cuda_cluster.dask import LocalCUDACluster
            from distributed import Client
            if __name__ == "__main__":
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                with LocalCUDACluster(**{QUIET!r}, n_workers=1) as cluster, Client(cluster) as client:
                    print(client.submit(sum, [1, 2]).result())
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_a_cluster_that_does_not_end_with_its_python_is_told(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal
            from cuda_cluster.dask import LocalCUDACluster
            if __name__ == "__main__":
                cluster = LocalCUDACluster(**{QUIET!r}, n_workers=1)
                print(cluster._owned._process.pid, cluster.name, flush=True)
                os.kill(cluster._owned._process.pid, signal.SIGSTOP)
            """
        )
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    pid, name = ended.stdout.split()
    os.kill(int(pid), signal.SIGCONT)
    assert f"cuda-cluster down --kill {name}" in ended.stderr, ended.stderr
    eventually(lambda: not others() and not files(), f"nothing is left: {others()}, {files()}")


@pytest.mark.parametrize("seconds", [0, 0.2, 0.5, 1])
def test_a_python_that_is_killed_while_it_starts_one_leaves_nothing(seconds):
    start = f"from cuda_cluster.dask import LocalCUDACluster; LocalCUDACluster(**{QUIET!r})"
    starts = subprocess.Popen([sys.executable, "-c", start])
    eventually(lambda: others() and files(), "it starts")
    time.sleep(seconds)
    starts.kill()
    starts.wait()
    eventually(lambda: not others() and not files(), f"nothing is left: {others()}, {files()}")


def test_a_start_that_fails_leaves_nothing():
    from cuda_cluster import ClusterError

    before = set(os.listdir("/proc/self/fd"))
    for wrong in ({"pre_import": "no_such_module"}, {"preload": ["no_such_module"]}):
        with pytest.raises(ClusterError, match="No module named 'no_such_module'"):
            LocalCUDACluster(**QUIET, n_workers=1, **wrong)
        assert not files(), "gone when it is raised"

    async def join():
        await CUDAWorker("tcp://127.0.0.1:9", **MACHINE, gpus="0", death_timeout="1s")

    with pytest.raises(ClusterError, match="no scheduler at tcp://127.0.0.1:9"):
        asyncio.run(join())
    assert not files()
    gc.collect()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "no descriptor is left")


def test_a_worker_that_looks_for_its_scheduler_ends_when_it_is_asked_to():
    async def story():
        starting = asyncio.ensure_future(CUDAWorker("tcp://127.0.0.1:9", **MACHINE, gpus="0")._start())
        await asyncio.to_thread(eventually, lambda: steps(LOOKS), "it looks for it")
        [path] = glob.glob(EVENTS)
        with open(path) as events:
            starting.cancel()
            await asyncio.to_thread(eventually, lambda: not others(), "they have ended")
            happened = [json.loads(line) for line in events]
        exits = [one["exit"]["code"] for one in happened if one["event"] == "exited"]
        assert exits == [0], happened
        assert "killed" not in {one["event"] for one in happened}

    asyncio.run(story())


def test_a_signal_before_the_first_wait_cancels_the_start_and_does_not_kill():
    program = """
import asyncio, os, signal, types
from cuda_cluster_dask import process

async def start():
    process.stop_asked(types.SimpleNamespace(is_ready=False))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)

try:
    asyncio.run(start())
except asyncio.CancelledError:
    print("cancelled")
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "crates/cluster/src/python"), *sys.path]),
    }
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "cancelled\n"), ended


#: The events of the clusters that run here, and what a worker says that waits for its scheduler.
EVENTS = os.path.join(RUNTIME, "cuda-cluster/*/events.jsonl")
LOOKS = "looking for the scheduler"


def steps(words):
    """The events in which a process says that it is about to do this."""
    lines = [line for path in glob.glob(EVENTS) for line in open(path)]
    return [line for line in lines if words in line]


def test_closing_a_cluster_whose_supervisor_is_stopped_kills_it_and_names_the_process(caplog):
    cluster = LocalCUDACluster(n_workers=1, **QUIET)
    supervisor = cluster._owned.state.supervisor_pid
    os.kill(supervisor, signal.SIGSTOP)
    closing = threading.Thread(target=cluster.close)
    closing.start()
    closing.join(120)
    if closing.is_alive():
        os.kill(supervisor, signal.SIGCONT)
    assert not closing.is_alive(), "it comes back"
    assert f"(process {supervisor}) was stopped" in caplog.text
    assert "so the cluster was killed" in caplog.text


def test_taking_down_a_cluster_whose_supervisor_is_stopped_warns_and_names_the_process():
    cluster = cuda_cluster.up(**MACHINE, engine="native", n_workers=1)
    supervisor = cluster.state().supervisor_pid
    os.kill(supervisor, signal.SIGSTOP)
    with pytest.warns(RuntimeWarning, match=rf"\(process {supervisor}\) was stopped"):
        cluster.down(timeout=120)


@pytest.mark.parametrize("engine", ["native", "dask"])
def test_who_closes_a_cluster_whose_program_is_stopped_is_told_of_it(engine):
    if engine == "dask":
        cluster = LocalCUDACluster(n_workers=1, **QUIET)
        owned, close = cluster._owned, cluster.close
    else:
        cluster = cuda_cluster.up(**MACHINE, engine="native", n_workers=1)
        owned, close = cluster._owned, cluster.down
    program = owned._process.pid
    os.kill(program, signal.SIGSTOP)
    try:
        with pytest.raises(cuda_cluster.ClusterError, match=f"process {program}.* is stopped") as told:
            close(timeout=120)
        assert told.value.hint == f"kill -CONT {program}"
    finally:
        os.kill(program, signal.SIGCONT)
    assert owned.wait_ended(60), "it ends when it goes on"


def test_a_cluster_ends_with_its_python_though_its_supervisor_is_stopped():
    start = textwrap.dedent(
        f"""
        import time
        from cuda_cluster.dask import LocalCUDACluster
        if __name__ == "__main__":
            cluster = LocalCUDACluster(**{QUIET!r}, n_workers=1)
            print(cluster._owned.state.supervisor_pid, flush=True)
            time.sleep(600)
        """
    )
    owner = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    os.kill(int(owner.stdout.readline()), signal.SIGSTOP)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    eventually(lambda: not others() and not files(), f"nothing is left: {others()}, {files()}", 120)
