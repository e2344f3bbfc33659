"""direct:// and host memory over UCX: forced by `route`, with the UCX that is here, and what decides over
it where machines have RDMA."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

comm = pytest.importorskip(
    "cuda_cluster.comm", reason="cargo build -p cuda-cluster-comm", exc_type=ImportError
)

import dask  # noqa: E402
import msgpack  # noqa: E402
from cuda_cluster import _plane  # noqa: E402
from distributed.comm import CommClosedError, connect  # noqa: E402
from distributed.protocol import to_serialize  # noqa: E402
from known import workers_of  # noqa: E402
from other_process import OtherProcess  # noqa: E402
from test_comm import descriptors, direct_cluster, in_a_loop, pair  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def over_ucx():
    with dask.config.set({"distributed.comm.direct.route": "ucx"}):
        yield


#: A process that answers each message with the same; told to stop, it reads no more.
ECHO = """
import sys
import dask
dask.config.set({"distributed.comm.direct.route": "ucx"})
from distributed.comm.core import CommClosedError
from distributed.protocol import to_serialize

async def answer(comm):
    try:
        while True:
            message = await comm.read()
            await comm.write({"data": [to_serialize(one) for one in message["data"]]})
    except CommClosedError as error:
        print(repr(error), repr(error.__cause__), file=sys.stderr, flush=True)
"""


class Echo(OtherProcess):
    """Another process, and a connection to it."""

    def __init__(self):
        super().__init__(ECHO)

    async def __call__(self, *data):
        try:
            return await asyncio.wait_for(self._echo(data), 300)
        except (CommClosedError, TimeoutError) as error:
            # A hang or an end that nobody expects is understood only from both sides.
            raise AssertionError(f"{error!r}; {self.condition()}") from error

    async def _echo(self, data):
        await self.comm.write({"data": [to_serialize(one) for one in data]})
        return (await self.comm.read())["data"]


def arrays(seed):
    chance = np.random.default_rng(seed)
    sizes = chance.choice([0, 1, 5_000, 65_535, 65_536, 3_000_000], chance.integers(1, 6))
    return [chance.integers(0, 255, size, dtype="u1") for size in sizes]


@in_a_loop
async def test_frames_arrive_unchanged_in_memory_that_is_used_again():
    before = comm.received()
    async with Echo() as echo:
        for seed in range(int(os.environ.get("COMM_SEEDS", "60"))):
            sent = arrays(seed)
            assert all(map(np.array_equal, await echo(*sent), sent)), seed
        assert echo.comm.extra_info["ucx"], echo.comm.extra_info
    assert comm.received()["ucx"] - before["ucx"] > 1_000_000
    assert comm.received()["device"] == before["device"]


def datagram_sockets(pid):
    """The abstract sockets of a process that take datagrams, as UCX's do to be woken."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:
            continue
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [
        "\0" + line[7][1:]
        for line in lines
        if line[4] == "0002" and line[7:8] and line[7][0] == "@" and f"socket:[{line[6]}]" in own
    ]


@in_a_loop
async def test_datagrams_of_strangers_cost_nothing_that_goes_over_ucx():
    sent = np.arange(1_000_000)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stranger.setblocking(False)
    async with Echo() as echo:
        await echo(sent)
        for datagram in (b"", b"x", bytes(4000), b""):
            for pid in (os.getpid(), echo.process.pid):
                names = datagram_sockets(pid)
                assert names, "UCX has one"
                for name in names * 50:
                    with contextlib.suppress(BlockingIOError):
                        stranger.sendto(datagram, name)
            before = comm.received()["ucx"]
            assert np.array_equal((await echo(sent))[0], sent)
            assert comm.received()["ucx"] - before == sent.nbytes
    stranger.close()


@in_a_loop
async def test_a_peer_that_dies_or_stops_in_the_middle_costs_one_connection():
    big = np.zeros(50_000_000, "u1")
    for sign in (signal.SIGKILL, signal.SIGSTOP):
        async with Echo() as echo:
            await echo(big)
            writing = asyncio.ensure_future(echo.comm.write({"data": [to_serialize(big)] * 8}))
            await asyncio.sleep(0.01)
            echo.process.send_signal(sign)
            if sign == signal.SIGSTOP:
                await asyncio.sleep(0.5)
                writing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await writing
            else:
                with pytest.raises(CommClosedError):
                    await writing
                    await echo.comm.read()
            assert echo.comm.closed()
            echo.process.send_signal(signal.SIGCONT)
        # Who is well is still spoken to.
        async with Echo() as echo:
            assert np.array_equal((await echo(big))[0], big)


@in_a_loop
async def test_what_is_cancelled_is_held_until_ucx_is_done_with_it():
    async with Echo() as echo:
        await echo(np.zeros(100_000, "u1"))
        before = descriptors()
        for turn in range(30):
            other = await connect(echo.address)
            sent = np.full(3_000_000, turn, "u1")
            writing = asyncio.ensure_future(other.write({"data": [to_serialize(sent)] * 4}))
            await asyncio.sleep(turn / 3000)
            writing.cancel()
            await asyncio.wait([writing])
            other.abort()
            del sent
            got = await echo(np.full(1_000_000, turn, "u1"))
            assert (got[0] == turn).all()
        deadline = time.monotonic() + 60
        while descriptors() > before + 2 and time.monotonic() < deadline:
            await echo(np.zeros(100_000, "u1"))
        assert descriptors() <= before + 2


@in_a_loop
async def test_after_some_failures_in_a_row_sockets_carry_on_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(_plane, "_plane", None)

    async def transfer():
        async with pair() as (ours, theirs):
            before = comm.received()["ucx"]
            sent = np.arange(100_000)
            ends = (ours.write(to_serialize(sent)), theirs.read())
            writing, reading = await asyncio.gather(*ends, return_exceptions=True)
            if isinstance(reading, Exception):
                return "lost"
            assert np.array_equal(reading, sent)
            return "by ucx" if comm.received()["ucx"] > before else "otherwise"

    assert await transfer() == "by ucx"
    with monkeypatch.context() as patch:
        fetch = comm._comm.fetch
        # It asks for what nobody offers.
        nobody = lambda *a: fetch(*a[:4], a[4] ^ 1, *a[5:])  # noqa: E731
        patch.setattr(comm._comm, "fetch", nobody)
        assert await transfer() == "lost"
    # One that fails is not all.
    assert await transfer() == "by ucx"
    with monkeypatch.context() as patch:
        patch.setattr(comm._comm, "fetch", nobody)
        found = [await transfer() for _ in range(5)]
    assert found == ["lost"] * _plane.FAILURES + ["otherwise"] * (5 - _plane.FAILURES)
    assert caplog.text.count("direct:// does without UCX") == 1, caplog.text
    monkeypatch.setattr(_plane, "_plane", None)


@in_a_loop
async def test_where_a_peer_has_told_no_key_sockets_carry_everything():
    async with pair() as ends:
        sent = np.arange(100_000)
        for key in (None, b"short", "x" * 32):
            for end in ends:
                end.remote_info[_plane.KEY] = key
            before = comm.received()["ucx"]
            _, got = await asyncio.gather(ends[0].write(to_serialize(sent)), ends[1].read())
            assert np.array_equal(got, sent)
            assert comm.received()["ucx"] == before


@pytest.mark.parametrize(
    "said",
    [
        b"\xc1",
        b"\x93\x01",
        msgpack.packb([b"nobody", 1, [[0, False, 70_000]]]),
        msgpack.packb([b"nobody", 1, [[7, False, 70_000]]]),
        msgpack.packb([b"nobody", -1, [[0, False, 70_000]]]),
        msgpack.packb([b"nobody", 1, [[0, False, 1 << 62]]]),
        msgpack.packb([b"nobody", 1, [[0, False, "x"]]]),
        msgpack.packb([b"nobody", 1, [[0, True, 70_000]]]),
        msgpack.packb({"x": 1}),
    ],
)
@in_a_loop
async def test_a_wrong_description_ends_the_connection_alone(said, monkeypatch):
    async with pair() as (ours, theirs), pair() as (others, of_others):
        with monkeypatch.context() as patch:
            wrong = lambda self, connection, events, frames, *more: ([*frames, said], None)  # noqa: E731
            patch.setattr(_plane._Plane, "offer", wrong)
            writing = asyncio.ensure_future(ours.write({"x": 1}))
            with pytest.raises(CommClosedError):
                await theirs.read()
            writing.cancel()
            await asyncio.wait([writing])
        # UCX is not given up for what a peer says.
        sent = np.arange(100_000)
        before = comm.received()["ucx"]
        _, got = await asyncio.gather(others.write(to_serialize(sent)), of_others.read())
        assert np.array_equal(got, sent)
        assert comm.received()["ucx"] > before


def test_dasks_workers_fetch_from_each_other_over_ucx():
    with direct_cluster() as client:
        one, other = workers_of(client)
        made = client.submit(np.arange, 4_000_000, workers=[one])
        assert client.submit(np.sum, made, workers=[other]).result() == sum(range(4_000_000))

        def received():
            from cuda_cluster import comm

            return comm.received()

        assert client.run(received)[other]["ucx"] >= 32_000_000


#: Messages on connections to another machine, as far as these processes know: how each travelled.
ELSEWHERE = """
import asyncio, logging, sys
sys.path.insert(0, {tests!r})
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import dask, numpy as np
from pathlib import Path
from cuda_cluster import _plane, comm
from distributed.protocol import to_serialize
from test_comm import pair

decide = _plane._Plane.takes_host
_plane._Plane.takes_host = lambda self, elsewhere: decide(self, True)
_plane.PORTS = Path({ports!r})
{more}

async def main():
    sent = np.arange(1_000_000)
    for _ in range(3):
        async with pair() as (ours, theirs):
            for _ in range(2):
                before = comm.received()["ucx"]
                _, got = await asyncio.gather(ours.write(to_serialize(sent)), theirs.read())
                assert np.array_equal(got, sent)
                print("by ucx" if comm.received()["ucx"] > before else "otherwise")

asyncio.run(main())
"""


def elsewhere(tmp_path, state, more="", transports="tcp,self"):
    """What such messages print, with a port of RDMA in a state."""
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    code = ELSEWHERE.format(tests=str(HERE), ports=str(tmp_path), more=more)
    environment = {**os.environ, "UCX_TLS": transports}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended
    return ended.stdout


def test_without_an_active_port_nothing_is_said_and_ucx_is_not_opened(tmp_path):
    said = elsewhere(tmp_path, "1: DOWN")
    assert said.splitlines() == ["otherwise"] * 6


def test_where_ucx_does_not_open_the_port_sockets_carry_on_with_one_warning(tmp_path):
    said = elsewhere(tmp_path, "4: ACTIVE").splitlines()
    assert said[1:] == ["otherwise"] * 6, said
    assert "a port of RDMA is active here, but UCX uses self, tcp" in said[0], said


def test_where_ucx_reaches_a_peer_without_rdma_sockets_carry_on_with_one_warning(tmp_path):
    # As if it had opened a port from which the peer is not to be reached.
    opened = """
direct = comm._comm.open_plane
comm._comm.open_plane = lambda *a: (*direct(*a)[:1], ["rc_verbs"], *direct(*a)[2:])
"""
    lines = elsewhere(tmp_path, "4: ACTIVE", more=opened).splitlines()
    told = [line for line in lines if "a port of RDMA is active here" in line]
    assert len(told) == 1 and "but UCX uses tcp/" in told[0], lines
    # The first of each connection shows it.
    assert [line for line in lines if line not in told] == ["by ucx", "otherwise"] * 3, lines


def test_lanes_are_known_by_their_transports():
    assert all(map(_plane.is_rdma, ["rc_verbs/mlx5_0:1", "dc_mlx5/mlx5_1:1", "ud_verbs/a:1"]))
    assert not any(map(_plane.is_rdma, ["tcp/eth0", "posix/memory", "cuda_ipc/cuda", "cma/memory"]))
