"""direct://, Dask's messages over our own connections: distributed's interface, with real processes."""

import asyncio
import contextlib
import gc
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import wraps
from pathlib import Path

import cuda_cluster
import dask
import numpy as np
import pytest
from conftest import MACHINE
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client, LocalCluster
from distributed.comm import CommClosedError, connect, listen
from distributed.comm.core import FatalCommClosedError
from distributed.protocol import to_serialize
from known import workers_of

comm = pytest.importorskip(
    "cuda_cluster.comm", reason="cargo build -p cuda-cluster-comm", exc_type=ImportError
)

ADDRESS = "direct://127.0.0.1:0"
#: How large frames travel: chosen, copied from process to process, in memory that both have mapped,
#: over a Unix socket, over TCP, by UCX.
WAYS = ["auto", "copied", "mapped", "socket", "tcp", "ucx"]


def in_a_loop(test):
    @wraps(test)
    def run(*arguments, **keywords):
        asyncio.run(asyncio.wait_for(test(*arguments, **keywords), 3600))

    return run


@contextlib.contextmanager
def travelling(way, monkeypatch):
    if way == "tcp":
        monkeypatch.setattr(comm, "_connect_unix", lambda names: None)
    with dask.config.set({"distributed.comm.direct.route": "auto" if way == "tcp" else way}):
        yield


@contextlib.asynccontextmanager
async def pair(address=ADDRESS, **keywords):
    """Both ends of a connection."""
    accepted = asyncio.Queue()
    async with listen(address, accepted.put, **keywords) as listener:
        ours = await connect(listener.contact_address, **keywords)
        theirs = await accepted.get()
        try:
            yield ours, theirs
        finally:
            ours.abort()
            theirs.abort()


@contextlib.contextmanager
def direct_cluster():
    """A client of two workers of Dask's own."""
    with (
        LocalCluster(protocol="direct", n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def message(seed):
    """Anything that Dask sends, of any size, from a seed."""
    chance = random.Random(seed)
    arrays = np.random.default_rng(seed)
    sizes = [0, 1, 100, 5_000, 70_000, 3_000_000]
    data = [arrays.integers(0, 255, chance.choice(sizes), dtype="u1") for _ in range(chance.randrange(5))]
    return {
        "op": "test",
        "text": "x" * chance.choice([0, 10, 100_000]),
        "bytes": chance.randbytes(chance.choice(sizes)),
        "data": [to_serialize(array) for array in data],
    }, data


@pytest.mark.parametrize("way", WAYS)
@in_a_loop
async def test_what_is_sent_arrives(way, monkeypatch):
    with travelling(way, monkeypatch):
        async with pair() as (ours, theirs):
            assert ours.extra_info["socket"] == ("tcp" if way == "tcp" else "unix")
            assert ours.extra_info["copies"] == (way in ("auto", "copied"),) * 2
            assert ours.extra_info["maps"] == (way in ("auto", "mapped"))
            seeds = range(60)

            async def send(end):
                for seed in seeds:
                    assert await end.write(message(seed)[0]) > 0

            async def receive(end):
                for seed in seeds:
                    wanted, data = message(seed)
                    got = await end.read()
                    assert (got["text"], got["bytes"]) == (wanted["text"], wanted["bytes"])
                    assert all(map(np.array_equal, got["data"], data)), seed
                    assert all(array.flags.writeable for array in got["data"])

            before = comm.received()["ucx"]
            await asyncio.gather(*(do(end) for do in (send, receive) for end in (ours, theirs)))
            assert (comm.received()["ucx"] > before) == (way == "ucx")
            assert bool(theirs.extra_info["ucx"]) == (way == "ucx")


@in_a_loop
async def test_arrays_of_any_shape_arrive():
    shapes = [
        np.array(42),
        np.array([], dtype="u1"),
        np.zeros((0, 3)),
        np.arange(12.0).reshape(3, 4).T,
        np.arange(10_000.0).reshape(100, 100)[::2, ::3],
        np.array(["a", None], dtype=object),
        np.arange(5).astype("M8[D]"),
    ]
    async with pair() as (ours, theirs):
        for array in shapes:
            # By Dask's serializer of arrays, and by pickle.
            for sent in (array, [array]):
                await ours.write({"data": to_serialize(sent)})
                got = (await theirs.read())["data"]
                got = got[0] if isinstance(sent, list) else got
                assert got.dtype == array.dtype and np.array_equal(got, array)


@pytest.mark.parametrize("way", WAYS)
@in_a_loop
async def test_a_large_array_is_one_frame_and_many_writes_need_no_reader(way, monkeypatch):
    big = np.random.default_rng(1).integers(0, 255, 100_000_000, dtype="u1")
    with travelling(way, monkeypatch):
        async with pair() as (ours, theirs):
            writes = []
            for number in range(3):
                message = {"number": number, "data": to_serialize(big[: 16 << 20])}
                writes.append(asyncio.ensure_future(ours.write(message)))
                if way != "ucx":
                    # As with TCP, whoever writes first and reads then does not wait for itself. UCX
                    # sends to who reads, as distributed-ucxx does.
                    await writes[-1]
            for number in range(3):
                got = await theirs.read()
                assert got["number"] == number and np.array_equal(got["data"], big[: 16 << 20])
            await asyncio.gather(*writes)
            await asyncio.gather(ours.write({"data": to_serialize(big)}), receive_big(theirs, big))


async def receive_big(end, big):
    got = (await end.read())["data"]
    assert np.array_equal(got, big)
    base = got.base
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    assert isinstance(base, comm._comm.Memory) and len(base) == len(big)


@in_a_loop
async def test_memory_is_used_again_only_when_no_array_looks_at_it():
    rng = np.random.default_rng(0)
    async with pair() as (ours, theirs):
        kept = []
        for turn in range(40):
            sent = rng.integers(0, 255, 1_000_000, dtype="u1")
            _, got = await asyncio.gather(ours.write(to_serialize(sent)), theirs.read())
            # Views of views, of which numpy forgets the one in the middle.
            view = got[10:-10].reshape(2, -1).T[5:]
            del got
            if turn % 3 == 0:
                kept.append((view, sent[10:-10].reshape(2, -1).T[5:].copy()))
            for view, wanted in kept:
                assert np.array_equal(view, wanted)
        # The one received last is replaced by the next one's place.
        places = set()
        for _ in range(10):
            _, got = await asyncio.gather(ours.write(to_serialize(sent)), theirs.read())
            places.add(got.__array_interface__["data"][0])
            del got
        assert len(places) <= 2, "memory is not used again"


@in_a_loop
async def test_the_end_of_a_peer_is_known_at_once():
    for end in ("close", "abort"):
        async with pair() as (ours, theirs):
            reading = asyncio.ensure_future(ours.read())
            await asyncio.sleep(0)
            done = getattr(theirs, end)()
            if done is not None:
                await done
            with pytest.raises(CommClosedError):
                await asyncio.wait_for(reading, 10)
            assert ours.closed() and theirs.closed()
            with pytest.raises(CommClosedError):
                await ours.write({})
            with pytest.raises(CommClosedError):
                await theirs.read()


@in_a_loop
async def test_messages_before_the_end_are_read():
    async with pair() as (ours, theirs):
        for number in range(5):
            await ours.write({"number": number})
        await ours.close()
        for number in range(5):
            assert (await theirs.read())["number"] == number
        with pytest.raises(CommClosedError):
            await theirs.read()


@in_a_loop
async def test_a_closed_end_is_seen_without_reading():
    async with pair() as (ours, theirs):
        await theirs.close()
        for _ in range(1000):
            if ours.closed():
                break
            await asyncio.sleep(0.01)
        assert ours.closed()


@pytest.mark.parametrize("way", WAYS)
@in_a_loop
async def test_who_is_cancelled_aborts(way, monkeypatch):
    big = to_serialize(np.zeros(200_000_000, dtype="u1"))
    with travelling(way, monkeypatch):
        async with pair() as (ours, theirs):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(theirs.read(), 0.01)
            assert theirs.closed()
            with pytest.raises(CommClosedError):
                await ours.read()
        async with pair() as (ours, theirs):
            # Serialised at once: what is cancelled before anything was sent needs no abort.
            ours.allow_offload = False
            writing = asyncio.ensure_future(ours.write(big))
            await asyncio.sleep(0.001)
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
                return  # it was faster
            assert ours.closed()
            # Part of a message is no message.
            with pytest.raises(CommClosedError):
                await asyncio.wait_for(theirs.read(), 10)


PEER = """
import asyncio, sys
import numpy as np
from distributed.comm import connect
from distributed.protocol import to_serialize

async def main(address, how):
    comm = await connect(address)
    await comm.write({"pid": 1})
    if how == "sends":
        data = np.ones(300_000_000, dtype="u1")
        while True:
            await comm.write({"data": to_serialize(data)})
    await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["sends", "sleeps"])
@in_a_loop
async def test_a_killed_peer_ends_its_connections_and_no_part_of_a_message_arrives(how, way, monkeypatch):
    accepted = asyncio.Queue()
    with travelling(way, monkeypatch):
        async with listen(ADDRESS, accepted.put) as listener:
            peer = subprocess.Popen([sys.executable, "-c", PEER, listener.contact_address, how])
            try:
                end = await accepted.get()
                assert await end.read() == {"pid": 1}
                if how == "sends":
                    await end.read()
                await asyncio.sleep(random.random() / 10)
                peer.send_signal(signal.SIGKILL)
                with pytest.raises(CommClosedError):
                    while True:
                        got = await asyncio.wait_for(end.read(), 10)
                        assert got["data"].all()
            finally:
                peer.kill()
                peer.wait()
                end.abort()


@in_a_loop
async def test_strangers_get_nowhere_and_harm_nobody():
    accepted = asyncio.Queue()
    async with listen(ADDRESS, accepted.put) as listener:
        host, port = listener.get_host_port()
        chance = random.Random(0)
        greeting = comm._comm.preamble() + b"\x01\0\0\0\0\0\0\0" + bytes(120)
        strangers = []
        for number in range(300):
            stranger = socket.create_connection((host, port))
            stranger.setblocking(False)
            strangers.append(stranger)
            kinds = [b"", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(5000), greeting]
            # The last sends what a peer of ours would, and then garbage.
            kinds.append(greeting + bytes(40) + chance.randbytes(500))
            with contextlib.suppress(OSError):
                stranger.send(kinds[number % len(kinds)])
        friend = await connect(listener.contact_address)
        end = await asyncio.wait_for(accepted.get(), 10)
        await friend.write({"hello": 1})
        while True:
            with contextlib.suppress(CommClosedError):
                if await asyncio.wait_for(end.read(), 10) == {"hello": 1}:
                    break
            end = await asyncio.wait_for(accepted.get(), 10)
        for stranger in strangers:
            stranger.close()
        friend.abort()


@in_a_loop
async def test_over_a_network_only_who_knows_the_secret_is_let_in(tmp_path, monkeypatch):
    secrets = [tmp_path / "one", tmp_path / "other"]
    for number, secret in enumerate(secrets):
        secret.write_text(f"{number:064x}\n")
        secret.chmod(0o600)

    def knowing(secret):
        return dask.config.set({"distributed.comm.direct.secret-file": str(secret)})

    async def serve(end):
        await end.write(await end.read())

    with travelling("tcp", monkeypatch):
        with knowing(secrets[0]):
            async with listen(ADDRESS, serve) as listener:
                ours = await connect(listener.contact_address)
                await ours.write("x")
                assert await ours.read() == "x"
                await ours.close()
                with knowing(secrets[1]), pytest.raises(OSError, match="secret"):
                    await connect(listener.contact_address, timeout=1)
                with (
                    dask.config.set({"distributed.comm.direct.secret-file": None}),
                    pytest.raises(FatalCommClosedError, match="the peer has a secret"),
                ):
                    await connect(listener.contact_address, timeout=1)
    secrets[1].chmod(0o644)
    with knowing(secrets[1]), pytest.raises(ValueError, match="open to all users; hint: chmod 600"):
        await listen(ADDRESS, serve).start()
    secrets[0].write_text("not a secret")
    with knowing(secrets[0]), pytest.raises(ValueError, match="64 hexadecimal digits"):
        await listen(ADDRESS, serve).start()
    async with listen(ADDRESS, serve) as listener:
        with knowing(tmp_path / "absent"), pytest.raises(ValueError, match="absent can't be read"):
            await connect(listener.contact_address, timeout=60)


@in_a_loop
async def test_where_encryption_is_required_it_refuses():
    with pytest.raises(RuntimeError, match="encryption required"):
        await connect("direct://127.0.0.1:1", require_encryption=True, timeout=1)
    with pytest.raises(RuntimeError, match="encryption required"):
        listen(ADDRESS, None, require_encryption=True)


@pytest.mark.parametrize(
    "address, why",
    [
        ("direct://", "it has no port"),
        ("direct://127.0.0.1", "it has no port"),
        ("direct://[::1]", "it has no port"),
        ("direct://:8786", "it has no host"),
        ("direct://127.0.0.1:0", "nobody listens on port 0"),
        ("direct://127.0.0.1:70000", "a port is at most 65535"),
        ("direct://127.0.0.1:-1", "a port is at most 65535"),
        ("direct://[::1", "it is not HOST:PORT"),
        ("direct://::1:8786", "it is not HOST:PORT"),
        ("direct://host:port", "it is not HOST:PORT"),
        ("direct://127.0.0.1:8786/x", "it is not HOST:PORT"),
    ],
)
@in_a_loop
async def test_what_is_no_address_is_told_with_what_was_given(address, why):
    told = "^" + re.escape(f"{address} can't be used: {why}; hint: ")
    with pytest.raises(ValueError, match=told):
        await connect(address)
    # Any port and any address of this machine are fine to listen on.
    if why.startswith(("it is not", "a port")):
        with pytest.raises(ValueError, match=told):
            await listen(address, None)


def test_a_cluster_with_a_wrong_setting_tells_its_key_before_anything_connects():
    key = "distributed.comm.direct.route"
    spec = {"dask": {"config": {key: "fast"}, "protocol": "direct"}}
    told = f"could not start: {key} must be auto, mapped, copied, socket or ucx: 'fast'"
    with pytest.raises(cuda_cluster.ClusterError, match=told) as raised:
        cuda_cluster.up(**MACHINE, engine="dask", spec=spec, python=sys.executable)
    assert "Traceback" not in str(raised.value)


@in_a_loop
async def test_addresses_are_true_and_those_of_hosts_with_several_too():
    async with pair("direct://0.0.0.0:0") as (ours, theirs):
        assert ours.extra_info["socket"] == "unix"
        assert ours.same_host and theirs.same_host
        assert ours.peer_address == theirs.local_address
        assert theirs.peer_address == ours.local_address


@in_a_loop
async def test_a_fork_leaves_its_parents_connections_alone_and_has_its_own():
    async with pair() as (ours, theirs):
        await ours.write({"before": 1})

        def child():
            assert ours.closed()
            ours.abort()

            async def own():
                with pytest.raises(CommClosedError, match="fork"):
                    await theirs.read()
                async with pair() as (one, other):
                    await one.write({"in": "the fork"})
                    assert await other.read() == {"in": "the fork"}

            asyncio.run(own())
            gc.collect()

        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                # The loop of the parent runs here, too.
                thread = threading.Thread(target=child)
                failed = []
                threading.excepthook = failed.append
                thread.start()
                thread.join()
                status = int(bool(failed))
            finally:
                os._exit(status)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert status == 0
        assert await theirs.read() == {"before": 1}
        await theirs.write({"after": 1})
        assert await ours.read() == {"after": 1}


def test_each_thread_may_have_its_loop():
    failures = []

    async def work():
        async with pair() as (ours, theirs):
            for seed in range(30):
                wanted, data = message(seed)
                _, got = await asyncio.gather(ours.write(wanted), theirs.read())
                assert all(map(np.array_equal, got["data"], data))

    def thread():
        try:
            for _ in range(3):
                asyncio.run(work())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


@in_a_loop
async def test_a_connection_with_nothing_to_do_wakes_nobody():
    """COMM_IDLE=60 for a minute."""

    def ticks():
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, stat[11:13]))

    def switches():
        return {
            task: next(
                int(line.split()[1])
                for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines()
                if line.startswith("voluntary")
            )
            for task in os.listdir("/proc/self/task")
            if Path(f"/proc/self/task/{task}/comm").read_text().startswith("direct")
        }

    async with pair() as (ours, _):
        reading = asyncio.ensure_future(ours.read())
        await asyncio.sleep(0.2)
        before, busy = switches(), ticks()
        assert before
        seconds = int(os.environ.get("COMM_IDLE", "1"))
        await asyncio.sleep(seconds)
        after = switches()
        print(f"{seconds} s: {ticks() - busy} ticks of {os.sysconf('SC_CLK_TCK')} a second")
        # Memory that nobody uses is given back in this time, or not.
        assert all(after[task] - before[task] <= 2 for task in before)
        reading.cancel()


@in_a_loop
async def test_connections_leave_nothing():
    async def serve(end):
        with contextlib.suppress(CommClosedError):
            while True:
                await end.write(await end.read())

    async with listen(ADDRESS, serve) as listener:

        async def visit(number):
            end = await connect(listener.contact_address)
            await end.write(number)
            if number % 3:
                assert await end.read() == number
            if number % 2:
                await end.close()
            else:
                end.abort()

        async def visits(count):
            for start in range(0, count, 20):
                await asyncio.gather(*map(visit, range(start, start + 20)))
            for _ in range(500):
                gc.collect()
                if descriptors() <= before + 2 and len(handlers) == len(listener._listeners):
                    break
                await asyncio.sleep(0.02)

        before = descriptors()
        handlers = comm.Loop.running().handlers

        def held():
            threads = len(os.listdir("/proc/self/task"))
            return {"descriptors": descriptors(), "KiB": resident() >> 10, "threads": threads}

        await visits(200)
        first = held()
        count = int(os.environ.get("COMM_CONNECTS", "1000"))
        await visits(count)
        last = held()
        print(f"{count} connections: {first} -> {last}")
        assert last["descriptors"] <= before + 2 and last["threads"] <= first["threads"] + 2
        assert len(handlers) == len(listener._listeners), "each end of a connection is forgotten"
        assert last["KiB"] - first["KiB"] < 64 << 10


def test_memory_goes_back_to_the_system_with_its_array():
    async def main():
        async with pair() as (ours, theirs):

            async def eventually_nothing_is_kept():
                for _ in range(3000):
                    if comm._comm.kept_memory() == 0:
                        return
                    gc.collect()
                    await asyncio.sleep(0.01)
                raise AssertionError(f"{comm._comm.kept_memory()} bytes are kept")

            sent = np.ones(50_000_000, dtype="u1")
            _, got = await asyncio.gather(ours.write(to_serialize(sent)), theirs.read())
            # What earlier tests left goes first: this memory, in use, is not among what is kept.
            await eventually_nothing_is_kept()
            assert np.array_equal(got, sent)
            held = resident()
            del got
            await eventually_nothing_is_kept()
            assert resident() < held - 40_000_000

    asyncio.run(main())


def test_a_cluster_of_dask_works_over_it():
    import dask.array as da

    with direct_cluster() as client:
        assert client.scheduler.address.startswith("direct://")
        workers = list(workers_of(client))
        assert all(worker.startswith("direct://") for worker in workers)
        x = da.random.default_rng(0).random((1500, 1500), chunks=(500, 500))
        y = (x + x.T).persist()
        assert np.allclose(y.sum().compute(), 2 * x.sum().compute())
        # Spilled and given to the other worker.
        big = client.submit(np.arange, 5_000_000, workers=workers[:1])
        total = client.submit(np.sum, big, workers=workers[1:])
        assert total.result() == sum(range(5_000_000))

        def lanes(dask_worker):
            pool = dask_worker.rpc.available.values()
            return [one.extra_info for ends in pool for one in ends]

        seen = [info for infos in client.run(lanes).values() for info in infos]
        assert seen and all(info["socket"] == "unix" for info in seen)


def test_local_cuda_cluster_verifies_how_its_data_travel(nothing_is_left):
    with (
        LocalCUDACluster(
            **MACHINE, protocol="direct", n_workers=2, verify=True, name="over-direct"
        ) as cluster,
        Client(cluster) as client,
    ):
        assert cluster.scheduler_address.startswith("direct://")
        assert client.submit(sum, [1, 2]).result() == 3
        state = cuda_cluster.attach("over-direct").state(wide=True)
        lanes = [peer["lanes"] for worker in state.json["workers"] for peer in worker["peers"]]
        assert lanes == [["direct/copy", "direct/mapped"]] * 2
        workers = sorted(workers_of(client))
        data = [
            client.submit(np.full, 3_000_000, n, workers=workers[n % 2], allow_other_workers=True, retries=5)
            for n in range(4)
        ]
        total = client.submit(lambda *arrays: sum(int(array[-1]) for array in arrays), *data, retries=5)
        assert total.result() == 6

        def received():
            infos = workers_of(client).values()
            metrics = [info["metrics"].get("direct", {}) for info in infos]
            return sum(one.get("copied", 0) + one.get("mapped", 0) for one in metrics)

        # Heartbeats bring it to the scheduler and its dashboard.
        for _ in range(600):
            if received() >= 2 * data[0].result().nbytes:
                break
            time.sleep(0.1)
        else:
            raise AssertionError(received())
        # Over a network, only who knows the cluster's secret is let in.
        stranger = (
            "import asyncio, cuda_cluster.comm as comm, sys\n"
            "from distributed.comm import connect\ncomm._connect_unix = lambda names: None\n"
            "asyncio.run(connect(sys.argv[1], timeout=5))"
        )
        command = [sys.executable, "-c", stranger, cluster.scheduler_address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "the peer has a secret, and this process has none" in done.stderr
        env = cuda_cluster.attach("over-direct").env()
        environment = {**os.environ, **env}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif("CUDA_CLUSTER_INSTALLED" in os.environ, reason="this Python has the package")
def test_a_python_without_the_package_is_told_what_direct_needs():
    with pytest.raises(cuda_cluster.ClusterError, match="cuda-cluster for the protocol direct"):
        environment = {**os.environ}
        try:
            os.environ.pop("PYTHONPATH")
            cuda_cluster.up(**MACHINE, engine="dask", protocol="direct", python=sys.executable, n_workers=1)
        finally:
            os.environ.update(environment)
