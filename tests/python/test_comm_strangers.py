"""direct://, strangers and bad days: floods, lies about sizes, peers that stop, networks that drop."""

import asyncio
import contextlib
import fcntl
import gc
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time

import dask
import numpy as np
import pytest
from distributed.comm import CommClosedError, connect, listen
from distributed.protocol import to_serialize

from hosts import needs_network
from test_comm import (
    ADDRESS,
    WAYS,
    comm,
    descriptors,
    in_a_loop,
    message,
    pair,
    resident,
    travelling,
)

MIB = 1 << 20
#: Another user, if there is one that we may become.
OTHER = "nobody" if os.geteuid() == 0 else None


async def until(holds, what, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return
        gc.collect()
        await asyncio.sleep(0.02)
    raise AssertionError(what())


class Good:
    """A pair that exchanges messages until it is told to stop, and how long the slowest took."""

    def __init__(self, ours, theirs):
        self.ends, self.exchanged, self.slowest = (ours, theirs), 0, 0.0
        self.running = asyncio.ensure_future(self.run())

    async def run(self):
        ours, theirs = self.ends
        while True:
            wanted, data = message(self.exchanged % 50)
            begun = time.monotonic()
            _, got = await asyncio.gather(ours.write(wanted), theirs.read())
            self.slowest = max(self.slowest, time.monotonic() - begun)
            assert (got["text"], got["bytes"]) == (wanted["text"], wanted["bytes"])
            assert all(map(np.array_equal, got["data"], data)), self.exchanged
            self.exchanged += 1
            await asyncio.sleep(0)

    async def more(self, count=5):
        """It goes on."""
        enough = self.exchanged + count
        await until(lambda: self.exchanged >= enough or self.running.done(), lambda: "it hangs")
        assert not self.running.done(), self.running.exception()


@contextlib.asynccontextmanager
async def good_pair():
    async with pair() as ends:
        good = Good(*ends)
        try:
            await good.more()
            yield good
            await good.more()
        finally:
            good.running.cancel()
            await asyncio.wait([good.running])


FLOOD = """
import os, pwd, resource, socket, sys, time
kind, count, host, port, unix, user = sys.argv[1:]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
if user:
    user = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
held, keep = [], min(5000, hard - 100)
for number in range(int(count)):
    over_tcp = number % 2
    stranger = socket.socket(socket.AF_INET if over_tcp else socket.AF_UNIX)
    stranger.settimeout(10)
    try:
        stranger.connect((host, int(port)) if over_tcp else bytes.fromhex(unix))
        if kind == "byte":
            stranger.send(b"c")
    except OSError:
        time.sleep(0.001)
    if kind == "close":
        stranger.close()
    else:
        held = [*held[-keep:], stranger] if len(held) > 2 * keep else held
        held.append(stranger)
        if len(held) > keep:
            held.pop(0).close()
print("done", flush=True)
sys.stdin.read()
"""


@contextlib.asynccontextmanager
async def flood(listener, kind, count, user=None):
    """So many strangers, of which thousands stay."""
    host, port = listener.get_host_port()
    name = comm._socket_name(host, port).encode().hex()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        FLOOD,
        kind,
        str(count),
        host,
        str(port),
        name,
        user or "",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process.stdout.readline()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("user", [None, OTHER] if OTHER else [None])
@pytest.mark.parametrize("kind", ["silent", "byte", "close"])
@in_a_loop
async def test_a_flood_of_strangers_harms_nobody_and_leaves_nothing(kind, user):
    count = int(os.environ.get("COMM_STRANGERS", "10000"))
    accepted = asyncio.Queue()
    async with listen(ADDRESS, accepted.put) as listener, good_pair() as good:
        await good.more(20)
        before, memory = descriptors(), resident()
        good.slowest, friends, slowest = 0.0, 0, 0.0
        async with flood(listener, kind, count, user) as flooded:
            flooded = asyncio.ensure_future(flooded)
            while not flooded.done():
                begun = time.monotonic()
                friend = await connect(listener.contact_address, timeout=60)
                end = await asyncio.wait_for(accepted.get(), 60)
                await friend.write({"hello": friends})
                assert await end.read() == {"hello": friends}
                slowest = max(slowest, time.monotonic() - begun)
                friend.abort()
                end.abort()
                friends += 1
                await asyncio.sleep(0.01)
            assert await flooded == b"done\n"
            most = descriptors()
        await good.more(20)
        await until(lambda: descriptors() <= before + 2, lambda: f"{descriptors()}, {before} before")
        grown = (resident() - memory) / MIB
        print(
            f"{count} {kind} of {user or 'this user'}: at most {most} descriptors of {before} before, "
            f"{grown:.0f} MiB more; {good.exchanged} messages, the slowest {good.slowest:.3f} s; "
            f"{friends} friends let in, the slowest {slowest:.3f} s"
        )
        assert grown < 100


SQUATTER = """
import os, pwd, socket, sys
os.setuid(pwd.getpwnam("nobody").pw_uid)
taken = socket.socket(socket.AF_UNIX)
taken.bind(bytes.fromhex(sys.argv[1]))
taken.listen(100)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(OTHER is None, reason="only root may become another user")
@in_a_loop
async def test_a_stranger_who_has_taken_the_name_of_a_unix_socket_keeps_nobody_out():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = comm._socket_name("127.0.0.1", port).encode().hex()
    squatter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SQUATTER, name, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert await squatter.stdout.readline() == b"done\n"
        accepted = asyncio.Queue()
        async with listen(f"direct://127.0.0.1:{port}", accepted.put) as listener:
            friend = await connect(listener.contact_address, timeout=60)
            end = await asyncio.wait_for(accepted.get(), 60)
            await friend.write({"hello": 1})
            assert await end.read() == {"hello": 1}
            friend.abort()
            end.abort()
    finally:
        squatter.kill()
        await squatter.wait()


#: A listener, or a peer that connects to it: another user, in a user namespace without numbers.
IN_A_NAMESPACE = """
import asyncio, ctypes, os, sys
import cuda_cluster.comm
from distributed.comm import connect, listen

os.setgroups([])
os.setuid(int(sys.argv[1]))
assert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())
assert os.geteuid() == int(open("/proc/sys/kernel/overflowuid").read())

async def serve():
    async with listen("direct://127.0.0.1", lambda comm: comm.write("welcome")) as listener:
        print(listener.contact_address, flush=True)
        await asyncio.to_thread(sys.stdin.read)

async def come(address):
    try:
        comm = await connect(address, timeout=20)
        print(await comm.read(), flush=True)
    except OSError as error:
        print(repr(error), flush=True)

asyncio.run(come(sys.argv[2]) if len(sys.argv) > 2 else serve())
"""


@pytest.mark.skipif(OTHER is None, reason="only root may become another user")
@in_a_loop
async def test_users_that_a_namespace_does_not_tell_apart_need_the_secret():
    async def start(*arguments, env=()):
        # One thread: a process with several has no namespace of its own.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **dict(env)}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", IN_A_NAMESPACE, *arguments,
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write("5" * 64)
        secret.flush()
        os.chmod(secret.name, 0o640)
        knows = {"DASK_DISTRIBUTED__COMM__DIRECT__SECRET_FILE": secret.name}
        server = await start("61001", env=knows)
        try:
            address = (await asyncio.wait_for(server.stdout.readline(), 60)).decode().strip()
            assert address.startswith("direct://"), address
            stranger, _ = await (await start("61002", address)).communicate()
            assert b"has a secret" in stranger and b"welcome" not in stranger, stranger
            friend, _ = await (await start("61002", address, env=knows)).communicate()
            assert friend == b"welcome\n"
        finally:
            server.kill()
            await server.wait()


@in_a_loop
async def test_strangers_do_not_take_the_descriptors_that_a_process_needs():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with listen(ADDRESS, None) as listener, good_pair():
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 400, limits[1]))
            async with flood(listener, "silent", 3000) as flooded:
                assert await flooded == b"done\n"
                with contextlib.ExitStack() as files:
                    for _ in range(150):
                        files.enter_context(open(os.devnull))
                async with pair() as (ours, theirs):
                    await ours.write({"hello": 1})
                    assert await theirs.read() == {"hello": 1}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def greeted(name, maps=False):
    """A socket of a peer that has greeted as ours do, whose next bytes are messages."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(name)
    hello = comm._comm.preamble() + struct.pack("<IBBBx", 2, 0, 0, maps)
    sock.sendall(hello + os.urandom(32) + bytes(40 + 48) + bytes(40))
    return sock


@in_a_loop
async def test_what_a_peer_announces_takes_no_memory_before_its_bytes_are_there():
    apart = 1 << 63
    header = struct.pack("<BBxxIQ", 1, 0, 1 << 24, 1)
    many = struct.pack("<BBxxIQ", 1, 0, 1 << 16, 1)
    lies = {
        "a number of frames": header,
        "half of as many descriptors": header + struct.pack("<QQ", 1, 0) * (1 << 16),
        "a frame as large as memory": struct.pack("<BBxxIQQQ", 1, 0, 1, 1, 1 << 45, 0) + bytes(100),
        "frames of 63 KiB": many + struct.pack("<QQ", 63 << 10 | apart, 0) * (1 << 16),
        "small frames": many + struct.pack("<QQ", 30 << 10, 0) * (1 << 16),
        "large frames": many[:4]
        + struct.pack("<I", 1000)
        + many[8:]
        + struct.pack("<QQ", 1 << 30 | apart, 0) * 1000,
    }
    # What comes first is as in an honest message.
    lies = {lie: bytes + b"x" * 100_000 for lie, bytes in lies.items()}
    accepted = asyncio.Queue()
    async with listen(ADDRESS, accepted.put) as listener, good_pair() as good:
        name = comm._socket_name(*listener.get_host_port())
        await good.more(50)
        before = resident()
        for lie, bytes_ in lies.items():
            liar = await asyncio.to_thread(greeted, name)
            await asyncio.to_thread(liar.sendall, bytes_)

            def unread(liar=liar):
                return struct.unpack("i", fcntl.ioctl(liar, termios.TIOCOUTQ, bytes(4)))[0]

            await until(lambda: unread() == 0, lambda: f"{lie}: {unread()} bytes")
            await good.more()
            grown = (resident() - before) / MIB
            print(f"{lie}: {grown:.0f} MiB more")
            assert grown < 64, lie
            liar.close()


ECHO = """
import asyncio, sys
from distributed.comm import connect
from distributed.protocol import to_serialize

async def main(address):
    comm = await connect(address)
    while True:
        await comm.write({"data": to_serialize((await comm.read())["data"])})

asyncio.run(main(sys.argv[1]))
"""


@contextlib.asynccontextmanager
async def echo(way, monkeypatch, accepted, listener):
    """A process that sends back what it gets."""
    program = ECHO
    if way == "tcp":
        program = "import cuda_cluster.comm as comm\ncomm._connect_unix = lambda names: None\n" + ECHO
    with monkeypatch.context() as patch:
        patch.setenv("DASK_DISTRIBUTED__COMM__DIRECT__ROUTE", "auto" if way == "tcp" else way)
        peer = subprocess.Popen([sys.executable, "-c", program, listener.contact_address])
    try:
        end = await asyncio.wait_for(accepted.get(), 120)
        end.allow_offload = False
        try:
            yield end, peer
        finally:
            end.abort()
    finally:
        peer.kill()
        peer.wait()


@pytest.mark.parametrize("way", WAYS)
@in_a_loop
async def test_who_stops_in_the_middle_of_a_message_holds_up_nobody_else(way, monkeypatch):
    chance, accepted, number = random.Random(way), asyncio.Queue(), 0
    with travelling(way, monkeypatch):
        async with (
            listen(ADDRESS, accepted.put) as listener,
            good_pair() as good,
            echo(way, monkeypatch, accepted, listener) as (end, peer),
        ):

            async def there_and_back():
                nonlocal number
                while True:
                    data = np.full(40_000_000, number % 251, dtype="u1")
                    await end.write({"data": to_serialize(data)})
                    assert np.array_equal((await end.read())["data"], data), number
                    number += 1

            going = asyncio.ensure_future(there_and_back())
            for _ in range(12):
                await asyncio.sleep(chance.random() / 10)
                peer.send_signal(signal.SIGSTOP)
                reached = number + 1
                await good.more()
                assert number <= reached and not going.done()
                peer.send_signal(signal.SIGCONT)
                await until(lambda: number > reached or going.done(), lambda: f"hangs after {number}")
            # And who is killed while it is stopped is gone.
            peer.send_signal(signal.SIGSTOP)
            await good.more()
            peer.kill()
            with pytest.raises(CommClosedError):
                await asyncio.wait_for(going, 60)


@pytest.mark.parametrize("way", WAYS)
@in_a_loop
async def test_for_a_peer_that_never_reads_its_writer_waits_and_memory_is_bounded(way, monkeypatch):
    data = np.ones(4 * MIB, dtype="u1")
    with travelling(way, monkeypatch):
        async with good_pair() as good, pair() as (ours, theirs):
            before = resident()
            written = 0

            async def write():
                nonlocal written
                while True:
                    await ours.write({"data": to_serialize(data)})
                    written += 1

            writing = asyncio.ensure_future(write())
            # UCX sends to who reads.
            least = 0 if way == "ucx" else 10
            await until(lambda: written >= least or writing.done(), lambda: f"only {written} are written")
            seen = -1
            while seen != written:
                seen = written
                await good.more(20)
            grown = (resident() - before) / MIB
            assert not writing.done() and written < 60, f"{written} messages wait, {grown:.0f} MiB"
            assert grown < 400
            for _ in range(written + 20):
                got = await asyncio.wait_for(theirs.read(), 60)
                assert np.array_equal(got["data"], data)
            ours.abort()
            with contextlib.suppress(CommClosedError):
                await writing


FAR = """
import asyncio, sys
import numpy as np
import dask
from distributed.comm import CommClosedError, connect
from distributed.protocol import to_serialize

async def main(address):
    idle, busy = await connect(address), await connect(address)
    await idle.write({"kind": "idle"})
    await busy.write({"kind": "busy"})

    async def read():
        await idle.read()

    async def write():
        while True:
            await busy.write({"data": to_serialize(np.ones(10_000_000, dtype="u1"))})

    for ended in await asyncio.gather(read(), write(), return_exceptions=True):
        assert isinstance(ended, CommClosedError), ended
    print("both are closed", flush=True)

dask.config.set({"distributed.comm.timeouts.tcp": "3s"})
asyncio.run(main(sys.argv[1]))
"""


@needs_network
@in_a_loop
async def test_a_network_that_drops_ends_its_connections_on_both_sides():
    run, link = subprocess.run, f"cc{os.getpid() % 100_000}"
    # A range for tests of networks.
    here, there = (f"198.18.{os.getpid() % 250}.{last}" for last in (1, 2))
    # Its network is made first; its link comes when it says so.
    far = await asyncio.create_subprocess_exec(
        "unshare",
        "--net",
        "sh",
        "-c",
        'echo; read go; exec "$@"',
        "-",
        sys.executable,
        "-c",
        FAR,
        "direct://" + here + ":27182",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        await far.stdout.readline()
        pid = str(far.pid)
        inside = ["nsenter", "--net", "--target", pid, "ip"]
        made = run(
            ["ip", "link", "add", link, "type", "veth", "peer", "name", "far", "netns", pid],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            pytest.skip(f"no network can be made here: {made.stderr.strip()}")
        for command in (
            ["ip", "address", "add", f"{here}/30", "dev", link],
            ["ip", "link", "set", link, "up"],
            [*inside, "address", "add", f"{there}/30", "dev", "far"],
            [*inside, "link", "set", "far", "up"],
        ):
            run(command, check=True)
        accepted = asyncio.Queue()
        with dask.config.set({"distributed.comm.timeouts.tcp": "3s"}):
            async with listen(f"direct://{here}:27182", accepted.put), good_pair() as good:
                far.stdin.write(b"go\n")
                ends = [await asyncio.wait_for(accepted.get(), 120) for _ in range(2)]
                kinds = {(await end.read())["kind"]: end for end in ends}
                assert all(end.extra_info["socket"] == "tcp" for end in ends)
                for _ in range(3):
                    await kinds["busy"].read()
                run(["ip", "link", "set", link, "down"], check=True)
                begun = time.monotonic()

                async def to_the_end(end):
                    with pytest.raises(CommClosedError):
                        while True:
                            await end.read()
                    return round(time.monotonic() - begun, 1)

                waits = await asyncio.wait_for(asyncio.gather(*map(to_the_end, kinds.values())), 120)
                print(f"with a time-out of 3 s: {dict(zip(kinds, waits))} s after the network was gone")
                await good.more()
                assert await asyncio.wait_for(far.stdout.readline(), 120) == b"both are closed\n"
    finally:
        run(["ip", "link", "delete", link], check=False, capture_output=True)
        with contextlib.suppress(ProcessLookupError):
            far.kill()
        await far.wait()
