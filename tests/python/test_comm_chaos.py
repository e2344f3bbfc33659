"""direct://, random faults under work, from a seed: whatever is killed, stopped, cut off or crowded,
results are right, no worker is lost that was not killed, nothing hangs, and nothing is left.

CHAOS_SEED determines the faults, CHAOS_FAULTS how many there are, and CHAOS_ONLY selects those whose
names contain it; scripts/chaos.sh runs hundreds.
"""

import collections
import contextlib
import ctypes
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from conftest import MACHINE, eventually, others
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client, wait
from distributed.comm import get_address_host_port
from known import workers_of
from test_comm import comm, descriptors

SEED = int(os.environ.get("CHAOS_SEED", "1"))
FAULTS = int(os.environ.get("CHAOS_FAULTS", "9"))
WORKERS = 3
MB = 1_000_000
#: An array's length in bytes: a frame of a socket, one that is copied, one that may be mapped.
SIZES = [1_000, 300_000, 8_000_000]

SPEC = """version: 1
supervision: {limit: 100000, backoff: 1ms, backoff_max: 20ms}
"""


def array(seed, size):
    return np.random.default_rng(seed).integers(0, 255, size, dtype="u1")


def shifted(left, right):
    """Of both arrays each byte, so that one that is wrong shows."""
    return np.add(left, right[::-1])


def work(client, chance):
    """A graph whose arrays move between workers, and what its results must be."""
    size, base = chance.choice(SIZES), chance.randrange(1 << 30)
    made = [client.submit(array, base + at, size, pure=False, retries=20) for at in range(6)]
    results = [
        client.submit(shifted, left, right, pure=False, retries=20)
        for left, right in zip(made, made[3:] + made[:3], strict=True)
    ]
    own = [array(base + at, size) for at in range(6)]
    expected = [shifted(own[at], own[(at + 3) % 6]) for at in range(6)]
    return results, expected


def signalled(pids, number):
    for pid in pids:
        # A worker whose scheduler has gone may go by itself.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def paused(pids, chance):
    signalled(pids, signal.SIGSTOP)
    time.sleep(chance.random())
    signalled(pids, signal.SIGCONT)


def connections(pid):
    """This process's sockets that carry direct://, as descriptors of our own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as kept:
        pidfd = os.pidfd_open(pid)
        kept.callback(os.close, pidfd)
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
                    continue
                # pidfd_getfd
                got = libc.syscall(438, pidfd, int(number), 0)
                if got < 0:
                    pytest.skip(f"no descriptor of another process: {os.strerror(ctypes.get_errno())}")
                sock = socket.socket(fileno=got)
                if is_direct(sock):
                    yield sock
                else:
                    sock.close()


def is_direct(sock):
    if sock.family != socket.AF_UNIX or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    names = [sock.getsockname(), sock.getpeername()]
    return any(name.startswith(b"\0cuda-cluster-comm/") for name in names if isinstance(name, bytes))


def cut_off(pid, chance):
    """Ends one of its connections, as a reset from outside would."""
    found = list(connections(pid))
    assert found, f"process {pid} has connections"
    chance.choice(found).shutdown(socket.SHUT_RDWR)
    for sock in found:
        sock.close()


def strangers(addresses, chance):
    """They say anything, or nothing, and some stay."""
    words = [b"", b"GET / HTTP/1.1\r\n\r\n", comm._comm.preamble(), comm._comm.preamble()[:5]]
    held = []
    for _ in range(60):
        host, port = get_address_host_port(chance.choice(addresses))
        sock = socket.socket(chance.choice([socket.AF_INET, socket.AF_UNIX]))
        sock.settimeout(1)
        with contextlib.suppress(OSError):
            is_unix = sock.family == socket.AF_UNIX
            sock.connect(comm._socket_name(host, port) if is_unix else (host, port))
            sock.sendall(chance.choice(words) + chance.randbytes(chance.choice([0, 1, 1000])))
        held.append(sock)
    for sock in held:
        sock.close()


def hold(size, seconds):
    """Memory of this worker's own, for a while."""

    def fill():
        block = np.ones(size, dtype="u1")
        time.sleep(seconds)
        del block

    threading.Thread(target=fill, name="holds").start()


def holds():
    return any(thread.name == "holds" for thread in threading.enumerate())


#: What may be struck, and whether a client may have to do its work again, because the scheduler, or
#: a connection to it, is lost: with it go futures, and workers, which are started again.
KINDS = {
    "nothing": False,
    "kill workers": False,
    "stop workers": False,
    "stop the scheduler": False,
    "strangers": False,
    "memory": False,
    "kill the scheduler": True,
    "kill everything": True,
    "cut a connection": True,
}


class Struck:
    """A cluster under attack."""

    def __init__(self, cluster, client):
        self.cluster, self.client = cluster, client
        self.counts = collections.Counter()
        self.again = 0

    def state(self):
        return self.cluster._attached.state()

    def strike(self, kind):
        """Does it at a random moment; the workers that it killed."""
        chance, state = self.chance, self.state()
        workers = sorted(worker.pid for worker in state.workers)
        victims = chance.sample(workers, chance.randrange(1, WORKERS))
        time.sleep(chance.random() / 5)
        if kind == "kill workers":
            signalled(victims, signal.SIGKILL)
            return set(victims)
        if kind == "stop workers":
            paused(victims, chance)
        elif kind == "stop the scheduler":
            paused([state.scheduler.pid], chance)
        elif kind == "strangers":
            strangers([self.cluster.scheduler_address, *self.addresses], chance)
        elif kind == "memory":
            self.client.run(hold, 600 * MB, chance.random())
        elif kind == "kill the scheduler":
            signalled([state.scheduler.pid], signal.SIGKILL)
        elif kind == "kill everything":
            signalled([state.scheduler.pid, *workers], signal.SIGKILL)
        elif kind == "cut a connection":
            cut_off(chance.choice([state.scheduler.pid, *workers]), chance)
        return set()

    def turn(self, number, kind):
        """One fault under work, and what must hold afterwards."""
        why = f"seed {SEED}, turn {number}: {kind}"
        # Of its own, because how often work is done again is not the seed's.
        self.chance = random.Random(f"{SEED} {number}")
        before = self.settled(why)
        print(f"direct {number}: {kind}")
        results, expected = work(self.client, self.chance)
        killed = self.strike(kind)
        while True:
            try:
                done, waiting = wait(results, timeout=300)
                got = self.client.gather(results)
                break
            except (CancelledError, OSError) as error:
                assert KINDS[kind], f"{why}: {error!r}"
                self.again += 1
                results, expected = work(self.client, self.chance)
        assert done and not waiting, why
        assert all(map(np.array_equal, got, expected)), f"wrong bytes: {why}"
        after = self.settled(why)
        if not KINDS[kind]:
            assert before - after == killed, why
        self.counts[kind] += 1

    def settled(self, why):
        """Waits until all is there that should be; the pids of the workers."""

        def is_whole():
            state = self.state()
            return state.state == "ready" and all(one.state == "ready" for one in state.workers)

        eventually(is_whole, f"READY: {why}", 300)
        self.client.wait_for_workers(WORKERS, timeout=300)
        eventually(lambda: not any(self.client.run(holds).values()), f"memory is free: {why}")
        info = workers_of(self.client)
        self.addresses = sorted(info)
        return {worker.pid for worker in self.state().workers}


def test_results_are_right_whatever_is_killed_stopped_or_cut_off(tmp_path, monkeypatch):
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "1000")
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    only = os.environ.get("CHAOS_ONLY", "")
    kinds = [kind for kind in KINDS if only in kind]
    assert kinds, f"CHAOS_ONLY is {only!r}, and there are {list(KINDS)}"
    chance, before = random.Random(SEED), (descriptors(), set(others()))
    with (
        LocalCUDACluster(
            protocol="direct",
            n_workers=WORKERS,
            memory_limit="1 GB",
            device_memory_limit=None,
            dashboard_address=None,
            local_directory=str(tmp_path),
            spec=str(spec),
            **MACHINE,
        ) as cluster,
        Client(cluster) as client,
    ):
        struck, begun = Struck(cluster, client), time.monotonic()
        try:
            for number in range(FAULTS):
                # In a short run each kind comes up.
                kind = kinds[number] if FAULTS <= len(kinds) else chance.choice(kinds)
                struck.turn(number, kind)
        finally:
            print(
                f"\ndirect: seed {SEED}: {struck.counts.total()} faults in "
                f"{time.monotonic() - begun:.1f}s: {dict(struck.counts)}, {struck.again} times again"
            )
    eventually(lambda: set(others()) <= before[1], f"no process is left: {others()}")
    # Why processes died may be told.
    left = {one.name for one in Path(cluster.run_directory).glob("*")}
    assert not left & {"secret", "control.sock", "supervisor.sock", "scheduler.json"}, left
    descriptors_left = lambda: descriptors() <= before[0] + 10
    eventually(descriptors_left, f"descriptors: {before[0]}, now {descriptors()}")
