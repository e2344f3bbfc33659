"""direct://, the memory that large frames travel through: who may write it, and when it is used again."""

import asyncio
import contextlib
import fcntl
import gc
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from array import array

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.comm import CommClosedError, connect, listen
from distributed.protocol import dumps, to_serialize
from distributed.system import MEMORY_LIMIT
from known import workers_of
from test_comm import ADDRESS, comm, in_a_loop, message, pair, travelling

MIB = 1 << 20


async def until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return
        gc.collect()
        await asyncio.sleep(0.01)
    raise AssertionError(f"shared {comm._comm.shared_memory()}, kept {comm._comm.kept_memory()}")


async def moved(ours, theirs, data):
    _, got = await asyncio.gather(ours.write({"data": to_serialize(data)}), theirs.read())
    assert np.array_equal(got["data"], data)
    return got["data"]


@in_a_loop
async def test_large_frames_are_written_to_mapped_memory_once_that_is_faster():
    rng = np.random.default_rng(1)
    async with pair() as (ours, theirs):
        assert ours.extra_info["maps"] and ours.extra_info["copies"] == (True, True)
        before = comm.received()
        data = [rng.integers(0, 255, 24 * MIB, dtype="u1") for _ in range(3)]
        for _ in range(3000):
            await moved(ours, theirs, data[0])
            if comm.received()["mapped"] > before["mapped"]:
                break
            if comm._comm.least_written() == 0:
                # Measured: copies are as fast here, and so they stay.
                assert comm.received()["copied"] > before["copied"]
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(f"{comm.received()}, {comm._comm.shared_memory()}")
        kept = [await moved(ours, theirs, one) for one in data]
        for _ in range(10):
            await moved(ours, theirs, data[0])
        # What is kept is as it was, wherever later messages were written.
        assert all(map(np.array_equal, kept, data))
        kept[0][:] = 1
        assert np.array_equal(kept[1], data[1])


@in_a_loop
async def test_mapped_memory_is_bounded_and_beyond_it_the_socket_carries_on(monkeypatch):
    data = np.random.default_rng(2).integers(0, 255, 70 * MIB, dtype="u1")
    with travelling("mapped", monkeypatch):
        async with pair() as (ours, theirs):
            before, kept = comm.received(), []
            limit = min(MEMORY_LIMIT // 8, 512 * MIB)
            for _ in range(limit // data.size + 2):
                kept.append(await moved(ours, theirs, data))
                assert comm._comm.shared_memory()[0] <= limit
            after = comm.received()
            assert after["mapped"] > before["mapped"]
            assert after["socket"] > before["socket"] + data.size
            assert after["copied"] == before["copied"]
            assert all(np.array_equal(one, data) for one in kept)
            kept.clear()
        # Neither end keeps anything of it when it is not used.
        await until(lambda: comm._comm.shared_memory() == (0, 0))


MEASURES = """
import sys, time
from cuda_cluster import comm

comm._comm.prepare_memory(1 << 20)
while comm._comm.least_written() is None:
    time.sleep(0.01)
print(comm._comm.least_written())
"""


def test_the_routes_are_measured_by_one_process_of_a_machine(tmp_path):
    def measured():
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        run = [sys.executable, "-c", MEASURES]
        return int(subprocess.run(run, env=environment, check=True, capture_output=True, timeout=60).stdout)

    measured()
    (remembered,) = (tmp_path / "cuda-cluster").iterdir()
    *machine, mapped, copied = remembered.read_text().split()
    assert 0 < float(mapped) < 1e-6 and 0 < float(copied) < 1e-6
    # 50 ps a byte are saved, and asking for it takes 100 us.
    remembered.write_text(" ".join([*machine, "5e-11", "1e-10"]))
    assert measured() == pytest.approx(2_000_000, rel=1e-3)
    # Of another boot: it measures itself.
    remembered.write_text(" ".join(["0", *machine[1:], "5e-11", "1e-10"]))
    measured()
    assert remembered.read_text().split()[:2] == machine


RECEIVER = """
import asyncio, sys
from distributed.comm import connect

async def main(address):
    comm = await connect(address)
    while True:
        await comm.write({"got": len((await comm.read())["data"])})

asyncio.run(main(sys.argv[1]))
"""


@in_a_loop
async def test_a_receiver_that_is_killed_while_it_is_written_to_harms_nobody(monkeypatch):
    data = np.ones(200 * MIB, dtype="u1")
    accepted = asyncio.Queue()
    with (
        travelling("mapped", monkeypatch),
        monkeypatch.context() as patch,
    ):
        patch.setenv("DASK_DISTRIBUTED__COMM__DIRECT__ROUTE", "mapped")
        async with listen(ADDRESS, accepted.put) as listener:
            for turn in range(4):
                peer = subprocess.Popen([sys.executable, "-c", RECEIVER, listener.contact_address])
                end = await accepted.get()
                end.allow_offload = False
                try:
                    await end.write({"data": to_serialize(data[: 10 * MIB])})
                    assert await end.read() == {"got": 10 * MIB}
                    writing = asyncio.ensure_future(end.write({"data": to_serialize(data)}))
                    await asyncio.sleep(turn / 50)
                    peer.send_signal(signal.SIGKILL)
                    with contextlib.suppress(CommClosedError):
                        await asyncio.wait_for(writing, 30)
                        await asyncio.wait_for(end.read(), 30)
                finally:
                    end.abort()
                    peer.kill()
                    peer.wait()
    await until(lambda: comm._comm.shared_memory()[1] == 0)


@in_a_loop
async def test_who_gives_up_in_the_middle_never_changes_what_others_have(monkeypatch):
    rng = np.random.default_rng(3)
    first, second = (rng.integers(0, 255, 40 * MIB, dtype="u1") for _ in range(2))
    chance = random.Random(3)
    with travelling("mapped", monkeypatch):
        kept = []
        for _ in range(30):
            async with pair() as (ours, theirs):
                ours.allow_offload = theirs.allow_offload = False
                writing = asyncio.ensure_future(ours.write({"data": to_serialize(first)}))
                reading = asyncio.ensure_future(theirs.read())
                await asyncio.sleep(chance.random() / 50)
                chance.choice([writing.cancel, reading.cancel, ours.abort, theirs.abort])()
                for task in (writing, reading):
                    with contextlib.suppress(asyncio.CancelledError, CommClosedError):
                        got = await asyncio.wait_for(task, 30)
                        if task is reading:
                            assert np.array_equal(got["data"], first)
            async with pair() as (ours, theirs):
                kept = [*kept[-2:], await moved(ours, theirs, second)]
            assert all(np.array_equal(one, second) for one in kept)


@in_a_loop
async def test_a_fork_keeps_what_it_saw_and_what_it_writes_is_its_own(monkeypatch):
    rng = np.random.default_rng(4)
    one, other = (rng.integers(0, 255, 8 * MIB, dtype="u1") for _ in range(2))
    with travelling("mapped", monkeypatch):
        async with pair() as (ours, theirs):
            seen = await moved(ours, theirs, one)
            begin, done = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                same = False
                try:
                    os.read(begin[0], 1)
                    same = np.array_equal(seen, one)
                    seen[:] = 0
                    os.write(done[1], b"x")
                    os.read(begin[0], 1)
                finally:
                    os._exit(0 if same else 1)
            own = seen.copy()
            os.write(begin[1], b"x")
            os.read(done[0], 1)
            assert np.array_equal(seen, own), "a fork has changed it"
            os.write(begin[1], b"x")
            _, status = os.waitpid(pid, 0)
            assert status == 0
            # Nothing is written to where a fork still looks.
            pid = os.fork()
            if pid == 0:
                same = False
                try:
                    os.read(begin[0], 1)
                    same = np.array_equal(seen, one)
                finally:
                    os._exit(0 if same else 1)
            del seen
            gc.collect()
            for _ in range(5):
                await moved(ours, theirs, other)
            os.write(begin[1], b"x")
            _, status = os.waitpid(pid, 0)
            assert status == 0


def frames(kind, number, count=0, flags=0):
    return struct.pack("<BBxxIQ", kind, flags, count, number)


@in_a_loop
async def test_a_peer_that_grants_nonsense_is_disconnected(tmp_path):
    """A peer that speaks our protocol by hand, up to the point where it lies."""
    accepted = asyncio.Queue()
    data = to_serialize(np.ones(3 * MIB, dtype="u1"))
    loop = asyncio.get_running_loop()

    def hello():
        return (
            comm._comm.preamble()
            + struct.pack("<IBBB", 2, 0, 0, 1)
            + b"\0"
            + os.urandom(32)
            + bytes(40)
            + bytes(48)
        )

    shrinking = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(shrinking, 1 << 20)
    sealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, 1 << 20)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    place = struct.pack("<Q", 0)
    lies = {
        "no file": (frames(3, 1, 1, 1) + place, None),
        "never sent one": (frames(3, 1, 1, 0) + place, None),
        "a file that may shrink": (frames(3, 1, 1, 1) + place, shrinking),
        "beyond its end": (frames(3, 1, 1, 1) + struct.pack("<Q", 1 << 50), sealed),
        "too small": (frames(3, 1, 1, 1) + place, sealed),
        "too many grants": (frames(3, 1, 2, 1) + place * 2, sealed),
        "another message": (frames(3, 7, 1, 1) + place, sealed),
        "two files": (frames(3, 1, 1, 1) + place, (sealed, sealed)),
        "written": (frames(4, 1), None),
        "taken": (frames(2, 9), None),
    }
    async with listen(ADDRESS, accepted.put) as listener:
        name = comm._socket_name(*listener.get_host_port())
        for lie, (answer, file) in lies.items():
            liar = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            liar.setblocking(False)
            liar.connect(name)
            await loop.sock_sendall(liar, hello())
            got = b""
            whole = len(hello()) + 40
            while len(got) < whole:
                got += await loop.sock_recv(liar, whole - len(got))
            await loop.sock_sendall(liar, bytes(40))

            async def talk():
                # Dask's own handshake comes first: small frames, which no grant is for.
                while await loop.sock_recv(liar, 1 << 16):
                    pass

            talking = asyncio.ensure_future(talk())
            try:
                handshake = {"compression": None, "python": (3, 11), "pickle-protocol": 5}
                parts = [bytes(part) for part in dumps(handshake)]
                head = frames(1, 1, len(parts))
                head += b"".join(struct.pack("<QQ", len(part), 0) for part in parts)
                await loop.sock_sendall(liar, head + b"".join(parts))
                end = await asyncio.wait_for(accepted.get(), 30)
                # The handshake was message 1.
                answer = answer.replace(struct.pack("<Q", 1), struct.pack("<Q", 2), 1)
                writing = asyncio.ensure_future(end.write({"data": data}))
                await asyncio.sleep(0.1)
                files = [] if file is None else [*file] if isinstance(file, tuple) else [file]
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))
                liar.sendmsg([answer], [rights] if files else [])
                with pytest.raises(CommClosedError):
                    await asyncio.wait_for(writing, 30)
                    raise AssertionError(f"{lie}: believed")
                assert end.closed(), lie
            finally:
                talking.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await talking
                liar.close()
        # Others are served as ever.
        friend = await connect(listener.contact_address)
        end = await asyncio.wait_for(accepted.get(), 30)
        await friend.write({"hello": 1})
        assert await end.read() == {"hello": 1}
        friend.abort()
        end.abort()
    os.close(shrinking)
    os.close(sealed)


FORBIDDEN = """
import asyncio, ctypes, logging, struct, sys
# A filter as a container may have it: process_vm_readv (310) is not permitted.
load, equal, refuse, allow = (0x20, 0, 0, 0), (0x15, 0, 1, 310), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *one) for one in (load, equal, refuse, allow)))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0

import numpy as np
from distributed.comm import connect, listen
from distributed.protocol import dumps, to_serialize
from distributed.system import MEMORY_LIMIT
import cuda_cluster.comm as comm

async def main():
    queue = asyncio.Queue()
    async with listen("direct://127.0.0.1:0", queue.put) as listener:
        for _ in range(2):
            ours = await connect(listener.contact_address)
            theirs = await queue.get()
            data = np.random.default_rng(0).integers(0, 255, 9_000_000, dtype="u1")
            _, got = await asyncio.gather(ours.write({"data": to_serialize(data)}), theirs.read())
            assert np.array_equal(got["data"], data)
        assert comm.received()["mapped"] == 18_000_000, comm.received()

logging.basicConfig(level=logging.WARNING)
asyncio.run(main())
"""


def test_where_processes_may_not_read_each_other_mapped_memory_carries_on_and_it_is_said_once():
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "may not read the memory" in line]
    assert len(said) == 1 and "through memory that both map" in said[0], done.stderr


ANOTHER = """
import asyncio, logging, sys
import numpy as np
from distributed.comm import connect, listen
from distributed.protocol import to_serialize
import cuda_cluster.comm as comm

async def echo(end):
    for _ in range(3):
        await end.write({"data": to_serialize((await end.read())["data"])})
    await end.write(end.extra_info["copies"][0])

async def serve():
    async with listen("direct://127.0.0.1:0", echo) as listener:
        print(listener.contact_address, flush=True)
        await asyncio.to_thread(sys.stdin.read)

async def come(address):
    end = await connect(address)
    for seed in range(3):
        data = np.full(9_000_000, seed, dtype="u1")
        _, got = await asyncio.gather(end.write({"data": to_serialize(data)}), end.read())
        assert np.array_equal(got["data"], data)
    print(end.extra_info["copies"][0], await end.read(), flush=True)

logging.basicConfig(level=logging.WARNING)
asyncio.run(come(sys.argv[1]) if len(sys.argv) > 1 else serve())
"""


@pytest.mark.parametrize("is_each", [False, True], ids=["connector", "each"])
@pytest.mark.parametrize(
    ("namespace", "cause"), [("pid", "another pid namespace"), ("user", "process's user namespace")]
)
def test_in_a_namespace_of_its_own_a_process_reads_no_other_and_is_told_why(namespace, cause, is_each):
    within = ["unshare", "--fork", "--kill-child", f"--{namespace}"]
    within += ["--map-root-user"] if namespace == "user" else []
    if shutil.which("unshare") is None or subprocess.run([*within, "true"], check=False).returncode:
        pytest.skip(f"no {namespace} namespace can be made here")
    program = [sys.executable, "-c", ANOTHER]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    server = subprocess.Popen([*(within * is_each), *program], text=True, **streams)
    try:
        address = server.stdout.readline().strip()
        done = subprocess.run(
            [*within, *program, address], capture_output=True, text=True, timeout=300, check=False
        )
        _, said_there = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert done.returncode == 0, done.stderr
    # Who is outside may read who is within.
    assert done.stdout.split() == ["False", str(not is_each)], done.stderr + said_there
    for said, is_told in [(done.stderr, True), (said_there, is_each)]:
        assert said.count("may not read the memory") == is_told, said
        assert (cause in said) == is_told, said


def test_an_unknown_lane_is_an_error_that_names_the_others():
    async def main():
        with dask.config.set({"distributed.comm.direct.route": "fast"}):
            async with listen(ADDRESS, None):
                pass

    with pytest.raises(ValueError, match="auto, mapped, copied, socket or ucx"):
        asyncio.run(main())


@in_a_loop
async def test_no_byte_is_wrong_in_seeded_runs():
    """COMM_SEEDS=1000 for the long form: messages of any form over all ways, in both directions."""
    seeds = int(os.environ.get("COMM_SEEDS", "40"))
    routes = ["auto", "mapped", "copied", "socket"]
    for start in range(0, seeds, 10):
        with dask.config.set({"distributed.comm.direct.route": routes[start // 10 % 4]}):
            async with pair() as (ours, theirs):

                async def send(end, seeds):
                    for seed in seeds:
                        await end.write(message(seed)[0])

                async def receive(end, seeds):
                    kept = []
                    for seed in seeds:
                        wanted, data = message(seed)
                        got = await end.read()
                        assert (got["text"], got["bytes"]) == (wanted["text"], wanted["bytes"])
                        kept = [*kept[-3:], (seed, got["data"], data)]
                        for seed, got, data in kept:
                            assert all(map(np.array_equal, got, data)), seed

                run = range(start, start + 10)
                await asyncio.gather(*(do(end, run) for do in (send, receive) for end in (ours, theirs)))


@pytest.mark.parametrize("route", ["copied", "mapped", "socket"])
def test_what_was_received_is_spilled_and_its_memory_is_given_back(route, tmp_path):
    """A worker with little memory receives more than it may keep."""
    keep, size, count = 128 * MIB, 40 * MIB, 12
    with (
        dask.config.set(
            {
                "distributed.comm.direct.route": route,
                "distributed.comm.direct.keep-memory": keep,
                # It would drop what two workers have.
                "distributed.scheduler.active-memory-manager.start": False,
                "distributed.worker.memory.spill": False,
                "distributed.worker.memory.pause": False,
                "distributed.worker.memory.terminate": False,
                "distributed.worker.memory.target": 0.5,
            }
        ),
        LocalCluster(
            protocol="direct",
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            memory_limit="400 MiB",
            local_directory=str(tmp_path),
        ) as cluster,
        Client(cluster) as client,
    ):
        one, other = sorted(workers_of(client))

        def state(dask_worker):
            import cuda_cluster.comm as comm
            import psutil

            gc.collect()
            data = dask_worker.data
            return {
                "memory": len(data.memory),
                "disk": len(data.disk),
                "received": comm.received(),
                "kept": comm._comm.kept_memory(),
                "shared": comm._comm.shared_memory()[0],
                "resident": psutil.Process().memory_info().rss,
            }

        def now():
            return client.run(state, workers=[other])[other]

        def eventually(holds):
            for _ in range(600):
                if holds(got := now()):
                    return got
                time.sleep(0.1)
            raise AssertionError(got)

        first = now()
        data = []
        for seed in range(count):
            data.append(client.submit(np.full, size, seed, dtype="u1", workers=[one], pure=False))
            client.replicate(data[-1:], workers=[one, other])
            got = now()
            assert got["kept"] <= keep and got["shared"] <= keep, got
        ways = {"copied": ["copied"], "mapped": ["mapped", "socket"], "socket": ["socket"]}[route]
        assert sum(got["received"][way] for way in ways) >= count * size, got
        assert got["memory"] + got["disk"] == count and got["disk"] >= count // 2, got
        full = got
        held = got["memory"] * size
        # What is on disk takes no memory, neither of the arrays nor of the pool.
        got = eventually(lambda got: got["kept"] == 0)
        assert got["resident"] - first["resident"] < held + 100 * MIB, (first, got)
        right = [
            client.submit(lambda array, seed=seed: bool((array == seed).all()), one, workers=[other])
            for seed, one in enumerate(data)
        ]
        assert all(client.gather(right))
        del data, right
        got = eventually(lambda got: got["memory"] + got["disk"] == got["kept"] == got["shared"] == 0)
        print(
            f"{route}: {count * size // MIB} MiB received, {held // MIB} MiB of it in memory; resident, in "
            f"MiB: {[one['resident'] // MIB for one in (first, full, got)]} (before, then, after)"
        )
        assert got["resident"] - first["resident"] < 100 * MIB, (first, got)
