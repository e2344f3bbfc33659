"""Measures what comes from other workers, for `cuda-cluster verify` and `bench links`.

They ask the worker that receives, over a socket of its own in the run directory: one JSON line a
question, one the answer (`cluster::dask::client` in Rust). A worker of another machine is asked by the
scheduler (`between.py`), over the connection that Dask has. It fetches from the sender as Dask's own
workers do, one message after the other. Over the same socket a worker says what it fetches (`fetching.py`).

*Invariant:* the first message of every question is compared byte by byte with what the sender was
asked for, which no earlier question has been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from distributed import Worker

from cuda_cluster_dask import control, fetching, lanes, wires
from cuda_cluster_fork.failure import describe
from cuda_cluster_dask.internals import send_recv, to_serialize

#: What a sender is asked for, and what a receiver on another machine is asked.
OPERATION, ASKED = "cuda_cluster_bytes", "cuda_cluster_measure"

#: Where the kernel counts what a port has received, in words of four bytes (InfiniBand, 16.1.3.5).
SYSFS = "CUDA_CLUSTER_SYSFS"
COUNTER, WORD = "class/infiniband/{}/ports/{}/counters/port_rcv_data", 4

BLOCK = 1 << 20
LOOK = 1  # Seconds between two looks whether the socket is there.
KEPT = 5.0  # Seconds for which a sender keeps what it may be asked for again.

# How device memory is sent and received, as Dask's own clients and workers do.
FOR_DEVICE = {"serializers": ("cuda", "dask", "pickle", "error")}


Memory = Literal["host", "device"]


#: A shorter message's time says little of a wire's bandwidth.
LONG = 1 << 20

#: Of each sender by its address, the bytes per second that were measured, and with messages of which size.
_rates: dict[str, tuple[float, int]] = {}


class Measured(TypedDict):
    """What came of a question. `ports` are those that were asked for and count, with what each has
    received meanwhile, from whomever."""

    rounds_ns: list[int]
    lanes: list[str]
    cause: str | None
    ports: dict[str, int]


class Failed(TypedDict):
    """Why nothing came of it; None where a question was only whether it can be asked."""

    error: str | None


class Told(TypedDict):
    """What it fetches, for `why`."""

    fetching: list[fetching.Fetching]


Answered = Measured | Failed | Told


class Wrong(Exception):
    """What arrived is not what was sent; says how, after `data from …`."""


def block(seed: str) -> bytes:
    """Random bytes, which no network compresses."""
    return random.Random(seed).randbytes(BLOCK)


def pattern(seed: str, size: int) -> bytearray:
    """The bytes for one question."""
    part = block(seed)
    whole, rest = divmod(size, BLOCK)
    return bytearray(part) * whole + part[:rest] if rest else bytearray(part) * whole


class Sender:
    """Answers those who ask for bytes."""

    def __init__(self) -> None:
        # By asker: what was asked for, the data, when they were asked for last.
        self._kept: dict[str, tuple[tuple[str, int, Memory], Any, float]] = {}
        self._is_due = False

    def answer(self, asker: str, seed: str, size: int, memory: Memory) -> dict[str, Any]:
        key = seed, size, memory
        kept = self._kept.pop(asker, None)
        if kept is not None and kept[0] == key:
            data = kept[1]
        else:
            del kept  # Memory for the new data.
            data = memoryview(pattern(seed, size))
            if memory == "device":
                import rmm

                data = rmm.DeviceBuffer.to_device(bytes(data))
        self._kept[asker] = key, data, time.monotonic()
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(KEPT, self._forget)
        return {"data": to_serialize(data)}

    def _forget(self) -> None:
        since = time.monotonic() - KEPT
        self._kept = {asker: kept for asker, kept in self._kept.items() if kept[2] > since}
        self._is_due = bool(self._kept)
        if self._is_due:
            asyncio.get_running_loop().call_later(KEPT, self._forget)


def answer(worker: Worker) -> None:
    """Has a worker that is not started yet answer those that will ask for bytes, and the scheduler that
    will ask how they come; with its heartbeats it tells the scheduler what it has measured."""

    async def measured(**question: Any) -> Answered:
        return await _answer(worker, **question)

    worker.handlers |= {OPERATION: Sender().answer, ASKED: measured}
    worker.metrics[wires.METRIC] = lambda _: {address: rate for address, (rate, _) in _rates.items()}


def received(ports: Sequence[str]) -> dict[str, int]:
    """What each of these NIC ports has received so far, in bytes; without those that nobody counts."""
    root, counted = Path(os.environ.get(SYSFS, "/sys")), {}
    for port in ports:
        device, _, number = port.partition(":")
        with contextlib.suppress(OSError, ValueError):
            counted[port] = int((root / COUNTER.format(device, number)).read_text()) * WORD
    return counted


async def measure(
    worker: Worker,
    address: str,
    size: int,
    messages: int = 0,
    rounds: int = 0,
    warmup: int = 0,
    memory: Memory = "host",
    ports: Sequence[str] = (),
) -> Measured:
    """Fetches from the worker at an address, compares, then measures."""
    seed = os.urandom(8).hex()
    options = FOR_DEVICE if memory == "device" else {}
    comm = await worker.rpc.connect(address)

    async def fetch() -> Any:
        asked = {"asker": worker.name, "seed": seed, "size": size, "memory": memory}
        return (await send_recv(comm, op=OPERATION, **asked, **options))["data"]

    try:
        before, counted = lanes.received(comm), received(ports)
        compare(await fetch(), seed, size)
        for _ in range(messages * warmup):
            await fetch()
        taken = []
        for _ in range(rounds):
            begin = time.perf_counter_ns()
            for _ in range(messages):
                await fetch()
            taken.append(time.perf_counter_ns() - begin)
        if taken and size >= max(LONG, _rates.get(address, (0.0, 0))[1]):
            _rates[address] = size * messages / (min(taken) * 1e-9), size
        used = lanes.carried(comm, before, size * (1 + messages * (warmup + rounds)))
        now = received(ports)
        why = lanes.cause(comm, memory, by_rdma=bool(ports))
        came = {port: now[port] - counted[port] for port in counted.keys() & now.keys()}
        return {"rounds_ns": taken, "lanes": used, "cause": why, "ports": came}
    finally:
        worker.rpc.reuse(address, comm)


def compare(data: Any, seed: str, size: int) -> None:
    """Compares all bytes with those that were asked for."""
    data = memoryview(data.tobytes() if hasattr(data, "__cuda_array_interface__") else data).cast("B")
    if len(data) != size:
        raise Wrong(f"has {len(data)} of {size} bytes")
    part = block(seed)
    for at in range(0, size, BLOCK):
        # As bytes: memoryviews are compared number by number.
        if bytes(data[at : at + BLOCK]) != part[: size - at]:
            raise Wrong(f"arrives changed, between bytes {at} and {min(at + BLOCK, size)}")


def no_device_memory() -> str | None:
    """Why this process cannot measure device memory; None if it can."""
    try:
        import rmm

        rmm.DeviceBuffer(size=1)
    except ImportError as error:
        return f"this Python has no rmm that can be imported: {error}"
    except Exception as error:
        return f"rmm gives no device memory: {describe(error)}"
    return None


async def listen(worker: Worker) -> str | None:
    """Answers questions to a worker from now on; returns why that is not possible, or None."""
    return await serve(functools.partial(_answer, worker), os.environ.get(control.PROCESS))


#: What answers a question, which is JSON.
Answering = Callable[..., Awaitable[Any]]


async def serve(answering: Answering, name: str | None) -> str | None:
    """Has questions answered that come over the socket of this name, from now on; returns why that is not
    possible, or None."""
    directory = os.environ.get(control.RUN_DIRECTORY)
    if directory is None or name is None:
        return None
    path = f"{directory}/{name}.sock"
    converse = functools.partial(_converse, answering)
    try:
        await asyncio.start_unix_server(converse, path)
    except OSError as error:
        return f"its connections cannot be measured: {path}: {error}"
    _listening.add(asyncio.create_task(_come_back(converse, path, f"{directory}/secret")))
    return None


_listening: set[asyncio.Task[None]] = set()


async def _come_back(converse: Any, path: str, secret_file: str) -> None:
    """Listens again when the socket was removed with its directory, and the supervisor has made that
    again: not in one with another cluster's secret."""
    secret = _content(secret_file)
    while True:
        await asyncio.sleep(LOOK)
        if not os.path.lexists(path) and secret is not None and _content(secret_file) == secret:
            with contextlib.suppress(OSError):
                await asyncio.start_unix_server(converse, path)


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


async def _converse(ask: Answering, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    answering = left = None
    try:
        question = json.loads(await reader.readline())
        answering = asyncio.ensure_future(ask(**question))
        left = asyncio.ensure_future(reader.read(1))
        # Nobody who has hung up waits for the answer.
        await asyncio.wait([answering, left], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            writer.write(json.dumps(answering.result()).encode() + b"\n")
            await writer.drain()
    except (OSError, TypeError, ValueError):
        pass  # Whoever asked has gone, or asks for something else.
    finally:
        for task in (answering, left):
            if task is not None:
                task.cancel()
        writer.close()


async def _answer(worker: Worker, ask: str, peer: str | None = None, **question: Any) -> Answered:
    if ask == "device":
        return {"error": no_device_memory()}
    if ask == "fetching":
        return {"fetching": fetching.told(worker)}
    why = no_device_memory() if question.get("memory") == "device" else None
    if why is not None:
        return {"error": why}
    try:
        return await measure(worker, **question)
    except Wrong as error:
        return {"error": f"data from {peer} {error}"}
    except Exception as error:
        return {"error": f"no data from {peer}: {describe(error)}"}
