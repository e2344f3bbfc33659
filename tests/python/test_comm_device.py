"""direct:// and device memory, on a made-up machine (`scripts/made-up.sh`): the real UCX of PyPI, whose
CUDA transports run over a driver that stands in (`tests/fake-machine/cuda`)."""

import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"
if "CUDA_CLUSTER_FAKE_CUDA_FAULTS" not in os.environ:
    pytest.skip("only on a made-up machine: scripts/made-up.sh 2", allow_module_level=True)
pytest.importorskip("libucx", reason="no UCX with CUDA transports: pip install libucx-cu13")
sys.path.insert(0, str(STAND_IN))
os.environ["PYTHONPATH"] += f":{STAND_IN}:{Path(__file__).parent}"

import device_memory  # noqa: E402
from cuda_cluster import _plane, comm  # noqa: E402
from cuda_cluster.dask import LocalCUDACluster  # noqa: E402
from device_memory import DeviceBuffer  # noqa: E402
from distributed import Client, wait  # noqa: E402
from distributed.comm import CommClosedError, connect  # noqa: E402
from distributed.protocol import to_serialize  # noqa: E402
from known import workers_of  # noqa: E402
from other_process import OtherProcess  # noqa: E402
from test_comm import descriptors, in_a_loop, pair  # noqa: E402

device_memory.begin()

SIZES = [0, 1, 100, 5_000, 70_000, 3_000_000]


def message(seed):
    """Buffers of any size in device memory between others in host memory, and their bytes."""
    chance = random.Random(seed)
    data = [chance.randbytes(chance.choice(SIZES)) for _ in range(chance.randrange(1, 6))]
    kinds = [chance.choice((bytes, DeviceBuffer.to_device)) for _ in data]
    return [to_serialize(kind(one)) for kind, one in zip(kinds, data, strict=True)], kinds, data


def bytes_of(one):
    return one.tobytes() if isinstance(one, DeviceBuffer) else bytes(one)


#: A process that answers each message with the same.
ECHO = """
import asyncio
import device_memory
if {context}:
    device_memory.begin()
from cuda_cluster import comm
from distributed.comm.core import CommClosedError
from distributed.protocol import to_serialize

async def answer(comm):
    try:
        while True:
            message = await comm.read()
            if message["do"] == "stop":
                await asyncio.sleep(3600)
            await comm.write({{"data": [to_serialize(one) for one in message["data"]],
                              "came": [getattr(one, "came", None) for one in message["data"]]}})
    except CommClosedError:
        pass
"""


class Echo(OtherProcess):
    """Another process, and a connection to it."""

    def __init__(self, context=True):
        super().__init__(ECHO.format(context=context))

    async def __call__(self, data):
        await self.comm.write({"do": "echo", "data": data})
        return await self.comm.read()


@in_a_loop
async def test_device_memory_goes_from_device_to_device_and_arrives_unchanged():
    async with Echo() as echo:
        for seed in range(int(os.environ.get("COMM_SEEDS", "60"))):
            frames, kinds, data = message(seed)
            reply = await echo(frames)
            assert [bytes_of(one) for one in reply["data"]] == data, seed
            ways = ["device" if kind is not bytes else None for kind in kinds]
            assert list(reply["came"]) == ways, seed
        assert any("cuda_ipc" in lane for lane in echo.comm.extra_info["devices"]), echo.comm.extra_info
    assert comm.received()["device"] > 1_000_000
    del reply, frames
    assert device_memory.living == 0


def test_memory_of_the_drivers_pool_which_has_no_context_arrives_unchanged():
    environment = {**os.environ, "DEVICE_POOL": "1"}
    story = [sys.executable, "-c", "import conftest, test_comm_device as it; it.there_and_back()"]
    done = subprocess.run(story, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and done.stdout == "20 messages\n", done.stdout + done.stderr


@in_a_loop
async def there_and_back():
    async with Echo() as echo:
        for seed in range(20):
            frames, _, data = message(seed)
            reply = await echo(frames)
            assert [bytes_of(one) for one in reply["data"]] == data, seed
    assert comm.received()["device"] > 1_000_000
    print(seed + 1, "messages")


@in_a_loop
async def test_both_ends_in_one_process_are_no_special_case():
    async with pair() as (ours, theirs):
        sent = DeviceBuffer.to_device(b"abc" * 500_000)
        _, got = await asyncio.gather(ours.write({"x": to_serialize(sent)}), theirs.read())
        assert got["x"].came == "device" and got["x"].tobytes() == sent.tobytes()


@in_a_loop
async def test_a_peer_without_a_gpu_gets_host_memory_and_never_opens_the_driver():
    async with Echo(context=False) as echo:
        reply = await echo([to_serialize(DeviceBuffer.to_device(b"abc" * 5000))])
        assert bytes_of(reply["data"][0]) == b"abc" * 5000
        assert not echo.comm.remote_info[_plane.DEVICES]


@in_a_loop
async def test_many_connections_of_two_processes_share_one_endpoint():
    async with Echo() as echo:
        comms = [await connect(echo.address) for _ in range(20)]
        before = descriptors()
        data = [to_serialize(DeviceBuffer.to_device(b"abc" * 50_000))]

        async def ask(comm):
            for _ in range(5):
                await comm.write({"do": "echo", "data": data})
                reply = await comm.read()
                assert reply["data"][0].tobytes() == b"abc" * 50_000

        await asyncio.gather(*map(ask, comms))
        assert descriptors() <= before + 8, "what UCX opens for one peer"
        for each in comms:
            each.abort()


@in_a_loop
async def test_a_peer_that_dies_in_the_middle_ends_the_read_at_once():
    for sign in (signal.SIGKILL, signal.SIGSTOP):
        async with Echo() as echo:
            await echo([to_serialize(DeviceBuffer.to_device(b"abc"))])
            frames = [to_serialize(DeviceBuffer.to_device(b"abc" * 5_000_000)) for _ in range(8)]
            echo.process.send_signal(sign)
            writing = asyncio.ensure_future(echo.comm.write({"do": "echo", "data": frames}))
            if sign == signal.SIGSTOP:
                await asyncio.sleep(0.5)
                assert not writing.done(), "nobody has the frames"
                writing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await writing
            else:
                with pytest.raises(CommClosedError):
                    await asyncio.wait_for(writing, 60)
                    await asyncio.wait_for(echo.comm.read(), 60)
            assert echo.comm.closed()
            echo.process.send_signal(signal.SIGCONT)


@in_a_loop
async def test_what_is_cancelled_is_kept_until_nothing_uses_it():
    async with Echo() as echo:
        await echo([to_serialize(DeviceBuffer.to_device(b"abc"))])
        for _ in range(20):
            other = await connect(echo.address)
            frames = [to_serialize(DeviceBuffer.to_device(b"abc" * 1_000_000)) for _ in range(4)]
            writing = asyncio.ensure_future(other.write({"do": "echo", "data": frames}))
            await asyncio.sleep(random.random() / 100)
            writing.cancel()
            await asyncio.wait([writing])
            other.abort()
            reply = await echo([to_serialize(DeviceBuffer.to_device(b"xyz" * 1_000))])
            assert reply["data"][0].tobytes() == b"xyz" * 1_000
        del frames, writing, reply
        # What the test before has left in a circle: its tasks, their errors, and its frames.
        gc.collect()
        deadline = time.monotonic() + 60
        while device_memory.living and time.monotonic() < deadline:
            # What was left is looked at when the next message comes.
            await echo([to_serialize(DeviceBuffer.to_device(b"abc"))])
        assert device_memory.living == 0


@in_a_loop
async def test_without_cuda_in_ucx_host_memory_carries_on_with_one_warning():
    code = """
import asyncio, logging, sys
sys.argv = ["x"]
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from test_comm_device import DeviceBuffer, pair, to_serialize

async def main():
    for _ in range(3):
        async with pair() as (ours, theirs):
            for _ in range(2):
                sent = DeviceBuffer.to_device(b"abc" * 50_000)
                _, got = await asyncio.gather(ours.write({"x": to_serialize(sent)}), theirs.read())
                assert got["x"].tobytes() == sent.tobytes()
                print("came", got["x"].came)

asyncio.run(main())
"""
    environment = {**os.environ, "UCX_TLS": "tcp,self,sm"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    said = ended.stdout
    assert ended.returncode == 0, ended
    assert said.count("direct:// moves device memory through host memory") == 1, said
    assert "has no CUDA transports" in said and said.count("came host") == 6, said


def make(seed, size):
    buffer = DeviceBuffer.to_device(random.Random(seed).randbytes(size))
    return buffer


def look(buffer):
    return getattr(buffer, "came", "here"), buffer.tobytes()


def test_dasks_workers_move_device_memory_and_clients_get_it():
    settings = {"protocol": "direct", "n_workers": 2, "dashboard_address": None}
    with LocalCUDACluster(**settings, ready_within="10m") as cluster, Client(cluster) as client:
        one, other = workers_of(client)
        futures = [client.submit(make, seed, 1_000_000, workers=[one], pure=False) for seed in range(5)]
        wait(futures)
        seen = client.gather([client.submit(look, f, workers=[other], pure=False) for f in futures])
        for seed, (came, data) in enumerate(seen):
            assert came == "device" and data == random.Random(seed).randbytes(1_000_000)
        # This test's module has made a context in the scheduler, which unpickles graphs.
        assert client.gather(futures[0]).tobytes() == random.Random(0).randbytes(1_000_000)


def test_ucxx_opens_no_nvml_with_the_plans_variables():
    """An open NVML holds the GPUs' files, and a process that holds them is not forked."""
    pytest.importorskip("ucxx")
    command = [os.environ["CUDA_CLUSTER_BIN"], "plan", "--engine", "dask", "--enable-nvlink", "-o", "json"]
    plan = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    planned = {name: value for name, value in plan["workers"][0]["env"].items() if name.startswith("UCX_")}
    assert planned["UCX_CUDA_COPY_MAX_REG_RATIO"] == "0.1", "this machine does not tell of BAR1"

    def opens(variables):
        look = "import ucxx; print('fake_nvml' in open('/proc/self/maps').read())"
        others = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        said = subprocess.run(
            [sys.executable, "-c", look], capture_output=True, text=True, env={**others, **variables}
        )
        return said.stdout.strip() or said.stderr

    assert opens({}) == "True", "by itself it does"
    assert opens(planned) == "False"
