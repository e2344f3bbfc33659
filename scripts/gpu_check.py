"""The first day of a GPU machine, for scripts/gpu-check.sh: each line says what it proves.

A check is registered with what it needs, so that what was not run is listed with the reason, and
nothing else can be missing from the list. Questions about the driver are asked by processes of their
own (`ask`), because a context holds memory.

*Invariant:* every registered check has exactly one outcome: ok, FAILED, told, or not checked.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20

#: How much less of a GPU may be free after a cluster than before it: what drivers keep for a while.
KEPT = 64 * MIB

#: Seconds for one question to the driver.
ANSWER = 60

#: On a stand-in speeds mean nothing.
STAND_IN = "CUDA_CLUSTER_FAKE_CUDA_FAULTS" in os.environ


class Failed(Exception):
    """What is wrong, in words for people."""


class NotChecked(Exception):
    """Why something was not checked."""


# --- the driver, in processes of their own ---------------------------------------------------------

_DRIVER = None


def cu(function: str, *arguments: Any) -> None:
    """Calls the driver."""
    global _DRIVER
    if _DRIVER is None:
        _DRIVER = ctypes.CDLL("libcuda.so.1")
    code = getattr(_DRIVER, function)(*arguments)
    if code != 0:
        text = ctypes.c_char_p(b"?")
        _DRIVER.cuGetErrorString(code, ctypes.byref(text))
        raise Failed(f"{function}: {(text.value or b'?').decode()} (CUDA error {code})")


class Handle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def context(pci: str) -> None:
    """Makes a GPU's primary context current."""
    device, handle = ctypes.c_int(), ctypes.c_void_p()
    cu("cuInit", 0)
    cu("cuDeviceGetByPCIBusId", ctypes.byref(device), pci.encode())
    cu("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
    cu("cuCtxSetCurrent", handle)


def free_bytes() -> tuple[int, int]:
    """Free and total memory of the current GPU."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cu("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def allocate(size: int) -> int:
    address = ctypes.c_uint64()
    cu("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def release(address: int) -> None:
    cu("cuMemFree_v2", ctypes.c_uint64(address))


def export(address: int) -> str:
    handle = Handle()
    cu("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.bytes).hex()


def opened(handle: str) -> int:
    address = ctypes.c_uint64()
    made = Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(handle)))
    cu("cuIpcOpenMemHandle_v2", ctypes.byref(address), made, 1)
    return address.value


def attribute(pci: str, number: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    cu("cuInit", 0)
    cu("cuDeviceGetByPCIBusId", ctypes.byref(device), pci.encode())
    cu("cuDeviceGetAttribute", ctypes.byref(value), number, device)
    return value.value


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    made = work()
    return made, (time.perf_counter() - begun) * 1e6


def serve(pci: str) -> None:
    """Answers questions about a GPU, a line of JSON each, until standard input ends."""
    if pci:
        context(pci)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        answer: Any = None
        try:
            if what == "free":
                answer = free_bytes()
            elif what == "allocate":
                answer = timed(lambda: allocate(arguments[0]))
            elif what == "release":
                answer = timed(lambda: release(arguments[0]))[1]
            elif what == "export":
                answer = export(arguments[0])
            elif what == "open":
                answer = timed(lambda: opened(arguments[0]))
            elif what == "close":
                cu("cuIpcCloseMemHandle", ctypes.c_uint64(arguments[0]))
            elif what == "attribute":
                answer = attribute(arguments[0], arguments[1])
            elif what == "fill":
                cu(
                    "cuMemsetD8_v2",
                    ctypes.c_uint64(arguments[0]),
                    ctypes.c_ubyte(arguments[1]),
                    ctypes.c_size_t(arguments[2]),
                )
                cu("cuCtxSynchronize")
            elif what == "copy":
                # From a peer's memory to one's own, and what arrived at the end.
                to, source, size = arguments
                last = (ctypes.c_ubyte * 16)()

                def copy() -> None:
                    cu("cuMemcpyDtoD_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))
                    cu("cuCtxSynchronize")

                copy()
                _, micros = timed(copy)
                cu("cuMemcpyDtoH_v2", last, ctypes.c_uint64(to + size - 16), ctypes.c_size_t(16))
                answer = [micros, bytes(last).hex()]
            reply = {"answer": answer}
        except Failed as error:
            reply = {"failed": str(error)}
        print(json.dumps(reply), flush=True)


class Asked:
    """A process that uses a GPU by itself."""

    def __init__(self, pci: str) -> None:
        command = [sys.executable, __file__, "--serve", pci]
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, *question: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            # One answer follows one question, so nothing is buffered.
            if not select.select([self._process.stdout], [], [], ANSWER)[0]:
                self._process.kill()
                raise Failed(f"the driver does not answer within {ANSWER} s: {question[0]}")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failed(self._last_words() or "the process that asked has ended")
        reply = json.loads(line)
        if "failed" in reply:
            raise Failed(reply["failed"])
        return reply["answer"]

    def _last_words(self) -> str:
        _, errors = self._process.communicate(timeout=30)
        lines = errors.strip().splitlines()
        return lines[-1].removeprefix("__main__.Failed: ") if lines else ""

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()


# --- the machine and the program --------------------------------------------------------------------


class Machine:
    """The machine as the program sees it, and what runs the program."""

    def __init__(self, binary: str, ucx: str) -> None:
        self.binary, self.ucx = binary, ucx
        self.name = f"gpu-check-{os.getpid()}"
        self.report: dict[str, Any] = {"version": 1, "stand_in": STAND_IN}
        self.topo: dict[str, Any] = {"gpus": [], "nics": [], "notes": [], "links": []}

    def run(self, *arguments: str, environment: dict[str, str] | None = None, timeout: float = 180) -> Any:
        try:
            return subprocess.run(
                [self.binary, *arguments],
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, **(environment or {})},
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(arguments)}: nothing within {timeout:.0f} s") from None

    def must(self, *arguments: str, environment: dict[str, str] | None = None, timeout: float = 180) -> str:
        done = self.run(*arguments, environment=environment, timeout=timeout)
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip().splitlines()
            # An error of the program and its hint, or what a table says.
            told = [
                line
                for line in said
                if re.match(r"(error|hint|failed|downgraded)|.*\b(failed|downgraded): ", line)
            ]
            raise Failed(
                f"{' '.join(arguments)} ended with {done.returncode}: {' / '.join(told or said[-3:])}"
            )
        return str(done.stdout)

    @property
    def gpus(self) -> list[dict[str, Any]]:
        return [gpu for gpu in self.topo["gpus"] if not gpu.get("mig_mode")]

    def link(self, one: int, other: int) -> str:
        names = {f"GPU{one}", f"GPU{other}"}
        return next((link["kind"] for link in self.topo["links"] if {link["a"], link["b"]} == names), "?")

    def state(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.must("ps", self.name, "-o", "json"))
        return document

    @contextlib.contextmanager
    def cluster(
        self, *arguments: str, environment: dict[str, str] | None = None, deaths: int = 0
    ) -> Iterator[None]:
        """A cluster that is taken down afterwards. A worker that was restarted unasked is a failure, and
        so is memory that does not come back."""
        before = self.free()
        try:
            self.must(
                "up", "--name", self.name, "--detach", "--ucx", self.ucx, *arguments, environment=environment
            )
            yield
            state = self.state()
            restarted = [one for one in state["workers"] if one["restarts"]]
            if len(restarted) > deaths:
                worst = restarted[0]
                reason = (worst.get("last_exit") or {}).get("reason", "no reason is recorded")
                raise Failed(f"{worst['name']} was restarted: {reason}")
        finally:
            self.run("down", self.name)
        if deaths:
            # The causes of deaths stay otherwise; these are known.
            shutil.rmtree(state["run_directory"], ignore_errors=True)
        # A driver takes a moment to clear what processes have left.
        for _ in range(20):
            lacking = [was - now for was, now in zip(before, self.free(), strict=True)]
            if max(lacking, default=0) <= KEPT:
                return
            time.sleep(0.5)
        gpu = lacking.index(max(lacking))
        raise Failed(f"GPU {gpu} has {lacking[gpu] // MIB} MiB less free than before the cluster")

    def free(self) -> list[int]:
        free = []
        for gpu in self.gpus:
            with Asked(gpu["pci"]) as asked:
                free.append(asked("free")[0])
        return free

    def workers(self) -> int:
        return len(self.state()["workers"])

    def transpose(self, chunks: int, size: int, runs: int, *more: str) -> None:
        self.must(
            "bench", "transpose", self.name, f"--chunks={chunks}", f"--chunk-size={size}", f"--runs={runs}", *more,
            timeout=300,
        )  # fmt: skip

    def links(self, *arguments: str, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
        done = self.run(
            "bench", "links", self.name, "--all", "--memory", "device", "-o", "json", *arguments, timeout=300
        )
        try:
            pairs: list[dict[str, Any]] = json.loads(done.stdout)["pairs"]
        except (ValueError, KeyError):
            raise Failed(f"bench links: {done.stderr.strip().splitlines()[-1:]}") from None
        return pairs


# --- the programme ----------------------------------------------------------------------------------

Check = Callable[[Machine], "str | None"]
CHECKS: list[tuple[str, str, Check]] = []


def check(what: str, proves: str) -> Callable[[Check], Check]:
    """Registers a check. What it returns is told; without anything it is ok."""

    def register(function: Check) -> Check:
        CHECKS.append((what, proves, function))
        return function

    return register


def several(machine: Machine) -> None:
    if len(machine.gpus) < 2:
        raise NotChecked("one GPU")


@check("GPUs as nvidia-smi says", "number, identity, place and memory of each GPU")
def as_smi(machine: Machine) -> None:
    fields = "--query-gpu=index,uuid,pci.bus_id,memory.total"
    said = subprocess.run(
        ["nvidia-smi", fields, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60
    )
    ours = {gpu["index"]: gpu for gpu in machine.topo["gpus"]}

    def place(text: str) -> tuple[int, str]:
        domain, rest = text.lower().split(":", 1)
        return int(domain, 16), rest

    wrong = []
    for line in said.stdout.splitlines():
        index, uuid, pci, mib = (part.strip() for part in line.split(","))
        gpu = ours.pop(int(index), None)
        if gpu is None:
            notes = [note["text"] for note in machine.topo["notes"] if note["about"] == f"GPU{index}"]
            wrong.append(f"GPU {index} is missing ({'; '.join(notes) or 'no note says why'})")
            continue
        if gpu["uuid"] != uuid:
            wrong.append(f"GPU {index}: {gpu['uuid']} is not {uuid}")
        if place(gpu["pci"]) != place(pci):
            wrong.append(f"GPU {index}: {gpu['pci']} is not {pci}")
        if abs(gpu["memory_bytes"] / MIB - float(mib)) > 0.05 * float(mib):
            wrong.append(f"GPU {index}: {gpu['memory_bytes']} bytes are not {mib} MiB")
    wrong += [f"GPU {index} is not in nvidia-smi" for index in ours]
    if wrong or said.returncode != 0:
        raise Failed("; ".join(wrong) or said.stderr.strip())


@check("links as nvidia-smi topo -m says", "the matrix: NVLinks, PCIe paths, CPU affinity")
def as_matrix(machine: Machine) -> None:
    smi = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=120)
    ours = machine.must("topo", "-o", "matrix")

    def rows(text: str) -> dict[tuple[str, str], str | None]:
        found: dict[tuple[str, str], str | None] = {}
        names: list[str] = []
        for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
            cells = line.split()
            if not cells:
                continue
            if not names and cells[0].startswith("GPU0"):
                names = [cell for cell in cells if re.fullmatch(r"(GPU|NIC)\d+", cell)]
            elif re.fullmatch(r"GPU\d+", cells[0]) and names:
                found.update({(cells[0], name): cell for name, cell in zip(names, cells[1:], strict=False)})
                rest = cells[1 + len(names) :]
                cpus = rest[0] if rest and re.fullmatch(r"[\d,-]+", rest[0]) else None
                found[cells[0], "cpus"] = cpus
        return found

    theirs, mine = rows(smi.stdout), rows(ours)
    wrong = [
        f"{a} {b}: nvidia-smi {cell}, ours {mine.get((a, b))}"
        for (a, b), cell in theirs.items()
        if cell is not None and mine.get((a, b)) != cell
    ]
    if wrong or not theirs:
        raise Failed("; ".join(wrong[:5]) or "nvidia-smi topo -m says nothing")


@check(
    "doctor", "CUDA works on each GPU: identity, context, 1 MiB there and back, IPC handle; UCX knows CUDA"
)
def doctor(machine: Machine) -> None:
    named = {} if machine.ucx == "auto" else {"CUDA_CLUSTER_UCX": machine.ucx}
    done = machine.run("doctor", "-o", "json", environment=named)
    findings = json.loads(done.stdout)["findings"]
    machine.report["doctor"] = findings
    about_gpus = {"driver", "cuda", "ucx", "ucx-cuda"}
    bad = [
        one for one in findings
        if one["severity"] == "error" or (one["id"] in about_gpus and one["severity"] == "warning")
    ]  # fmt: skip
    if bad:
        told = (f"{one['id']}: {one['text']} (do: {one.get('remedy', 'see --explain')})" for one in bad)
        raise Failed("; ".join(told))


@check(
    "bandwidth",
    "copies between the host and each GPU, and between GPUs, by the driver alone: bytes and speed",
)
def bandwidth(machine: Machine) -> str:
    done = machine.run("doctor", "--bandwidth", "-o", "json", timeout=300)
    rows = json.loads(done.stdout).get("bandwidth", [])
    machine.report["bandwidth"] = rows
    wrong = {"failed"} if STAND_IN else {"failed", "slow"}
    bad = [row for row in rows if row["verdict"] in wrong]
    if bad or not rows:
        told = (f"{row['from']} to {row['to']}: {row['text']}" for row in bad[:5])
        raise Failed("; ".join(told) or "nothing was measured")
    speeds = sorted(row["gb_per_s"] for row in rows if row["gb_per_s"])
    left_out = sum(row["verdict"] == "left_out" for row in rows)
    return f"{len(rows)} ways, {speeds[0]:.1f} to {speeds[-1]:.1f} GB/s, {left_out} left out"


@check("the NVLink fabric", "every GPU is registered, and NVLinks that are up have peer access")
def fabric(machine: Machine) -> str:
    several(machine)
    wrong = [
        f"{note['about']}: {note['text']}"
        for note in machine.topo["notes"]
        if "fabric" in note["text"] or "peer access" in note["text"]
    ]
    if wrong:
        raise Failed("; ".join(wrong))
    registered = sum("fabric" in gpu for gpu in machine.gpus)
    return f"{registered} of {len(machine.gpus)} GPUs are in a fabric; no NVLink is refused"


@check("free memory", "nobody else has the GPUs: less than a tenth of each is taken before the first cluster")
def free_memory(machine: Machine) -> None:
    for gpu in machine.gpus:
        with Asked(gpu["pci"]) as asked:
            free, total = asked("free")
        if free < 0.9 * total:
            processes = gpu.get("processes") or "NVML names no process"
            raise Failed(f"GPU {gpu['index']}: {free // MIB} of {total // MIB} MiB are free ({processes})")


@check("freed memory that a peer has mapped", "whether the driver keeps it, which the pool is built for")
def kept_memory(machine: Machine) -> str:
    gpu = machine.gpus[0]
    size = 256 * MIB
    with Asked(gpu["pci"]) as owner, Asked(gpu["pci"]) as peer:
        before = owner("free")[0]
        address, _ = owner("allocate", size)
        mapping, _ = peer("open", owner("export", address))
        owner("release", address)
        freed = owner("free")[0]
        again, _ = owner("allocate", size)
        peer("close", mapping)
        owner("release", again)
        closed = owner("free")[0]
    kept = before - freed > size // 2
    word = "keeps it until the peer has closed it" if kept else "gives it back at once"
    place = "the same address" if again == address else "another address"
    left = (before - closed) // MIB
    return f"the driver {word}; the next piece gets {place}; {left} MiB are missing at the end"


@check("what allocations cost", "times of cuMemAlloc, cuMemFree and cuIpcOpenMemHandle: the price of a slab")
def prices(machine: Machine) -> str:
    gpu = machine.gpus[0]
    told = []
    with Asked(gpu["pci"]) as owner, Asked(gpu["pci"]) as peer:
        for mib in (2, 64, 1024):
            if owner("free")[0] < 2 * mib * MIB:
                continue
            address, taking = owner("allocate", mib * MIB)
            mapping, opening = peer("open", owner("export", address))
            peer("close", mapping)
            told.append(f"{mib} MiB: {taking:.0f}, {owner('release', address):.0f}, {opening:.0f} µs")
    return "; ".join(told)


@check(
    "memory of each GPU from each other",
    "CUDA IPC by the driver alone: all pairs map and copy as their links promise",
)
def pairs(machine: Machine) -> str:
    several(machine)
    size, wrong, speeds, refused = 64 * MIB, [], {}, 0
    with contextlib.ExitStack() as stack:
        asked = {gpu["index"]: stack.enter_context(Asked(gpu["pci"])) for gpu in machine.gpus}
        base = {}
        for index, one in asked.items():
            address, _ = one("allocate", size)
            one("fill", address, index + 1, size)
            base[index] = (address, one("export", address))
        for reader, one in asked.items():
            target, _ = one("allocate", size)
            for owner in asked:
                if owner == reader:
                    continue
                try:
                    mapping, _ = one("open", base[owner][1])
                    micros, last = one("copy", target, mapping, size)
                    one("close", mapping)
                except Failed as error:
                    refused += 1
                    if machine.link(owner, reader).startswith("NV"):
                        wrong.append(
                            f"GPU {reader} cannot map GPU {owner} over {machine.link(owner, reader)}: {error}"
                        )
                    continue
                if last != f"{owner + 1:02x}" * 16:
                    wrong.append(f"GPU {reader} read other bytes from GPU {owner}")
                speeds[owner, reader] = size / micros / 1e3
            one("release", target)
    machine.report["copies_gb_per_s"] = {f"{a}-{b}": round(speed, 2) for (a, b), speed in speeds.items()}
    if wrong:
        raise Failed("; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    if not speeds:
        return f"no pair may ({refused} refused): device memory is staged in host memory"
    return f"{len(speeds)} pairs, {min(speeds.values()):.1f} to {max(speeds.values()):.1f} GB/s, {refused} refused"


@check("two workers on one GPU", "cuda_ipc and cuda_copy over real UCX; host and device memory are verified")
def two_on_one(machine: Machine) -> str:
    with machine.cluster("--gpus", "0", "--workers-per-gpu", "2"):
        state = machine.state()
        lanes = {
            lane.split("/")[0]
            for worker in state["workers"]
            for peer in worker["peers"]
            for lane in peer["lanes"]
        }
        if "cuda_ipc" not in lanes:
            raise Failed(f"the connections have no cuda_ipc lane, only {' '.join(sorted(lanes))}")
        machine.must("verify", machine.name, "--memory", "both", timeout=300)
        rows = machine.links("--size", "64KiB,64MiB,1GiB", "--rounds", "3")
        machine.report["one_gpu_links"] = rows
        best = max((row["gb_per_s"] or 0 for row in rows), default=0)
        # Through host memory, PCIe 5.0 carries 63 GB/s at best; within the GPU it is far more.
        if not STAND_IN and best < 65:
            raise Failed(f"{best:.1f} GB/s at best within one GPU: less than through the host")
        return f"{' '.join(sorted(lanes))}; {best:.1f} GB/s at best"


@check(
    "a long-lived cluster",
    "objects that come and go do not fill the GPU: transposes in a small pool, again and again",
)
def long_lived(machine: Machine) -> str:
    limit = ("--device-memory-limit", "1GiB")
    with machine.cluster("--gpus", "0", "--workers-per-gpu", "2", *limit):
        for _ in range(4 if STAND_IN else 20):
            machine.transpose(4, 2124, 1)
        pools = [worker["device_pool"] for worker in machine.state()["workers"]]
        held = max(pool["held_bytes"] for pool in pools)
        if held > 2 << 30:
            raise Failed(f"a worker with a limit of 1 GiB holds {held // MIB} MiB")
        return f"{held // MIB} MiB in {max(pool['slabs'] for pool in pools)} slabs at most"


@check(
    "bytes as they arrive",
    "what is written to new memory and read by a peer at once is right: hundreds of checked sums",
)
def bytes_arrive(machine: Machine) -> None:
    with machine.cluster("--gpus", "0", "--workers-per-gpu", "2"):
        for size in (96, 512, 1400):
            machine.transpose(6, size, 1 if STAND_IN else 8, "--check")


@check("without cuda_ipc", "staged device memory is pipelined: the ratio to UCX's 8 KiB pieces")
def staged(machine: Machine) -> str:
    best = []
    for handling in ("y", "n"):
        settings = {"UCX_TLS": "cuda_copy,posix,cma,self", "UCX_RNDV_PIPELINE_ERROR_HANDLING": handling}
        with machine.cluster("--gpus", "0", "--workers-per-gpu", "2", environment=settings):
            rows = machine.links("--size", "64MiB", "--rounds", "3")
            best.append(max((row["gb_per_s"] or 0 for row in rows), default=0))
    if not all(best):
        raise Failed(f"{best} GB/s")
    return f"{best[0]:.2f} GB/s, {best[0] / best[1]:.1f} times the pieces' {best[1]:.2f}"


@check(
    "a worker that is killed in the middle", "it comes back, the work ends right, its memory is free again"
)
def killed(machine: Machine) -> None:
    with machine.cluster("--gpus", "0", "--workers-per-gpu", "2", deaths=2):
        command = [
            machine.binary,
            "bench",
            "transpose",
            machine.name,
            "--chunks=6",
            "--chunk-size=1024",
            "--runs=3",
            "--check",
        ]
        work = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(0.5)
        os.kill(machine.state()["workers"][1]["pid"], signal.SIGKILL)
        _, errors = work.communicate(timeout=300)
        if work.returncode != 0:
            raise Failed(f"the work ended with {work.returncode}: {errors.strip().splitlines()[-1:]}")
        for _ in range(120):
            if machine.state()["state"] == "ready":
                return
            time.sleep(0.5)
        raise Failed("the cluster is not READY again after a minute")


@check("spilling", "four times the device memory limit goes to the host and comes back right")
def spilling(machine: Machine) -> None:
    with machine.cluster("--gpus", "0", "--workers-per-gpu", "2", "--device-memory-limit", "256MiB"):
        machine.transpose(8, 2048, 1, "--check")


@check("a full GPU", "where another process has 95 % of it, work is slow and right")
def full(machine: Machine) -> None:
    gpu = machine.gpus[0]
    with Asked(gpu["pci"]) as holder:
        free, total = holder("free")
        holder("allocate", int(free - 0.05 * total))
        done = machine.run(
            "up",
            "--name",
            machine.name,
            "--detach",
            "--ucx",
            machine.ucx,
            "--gpus",
            "0",
            "--busy-gpus",
            "use",
        )
        try:
            if done.returncode != 0:
                raise Failed(done.stderr.strip().splitlines()[0])
            machine.transpose(8, 1024, 1, "--check")
        finally:
            machine.run("down", machine.name)


@check("all GPUs", "READY, and each pair is verified in host and device memory against its link")
def all_gpus(machine: Machine) -> str:
    several(machine)
    nvlink = any(
        machine.link(a["index"], b["index"]).startswith("NV") for a in machine.gpus for b in machine.gpus
    )
    flags = ["--enable-nvlink"] if nvlink else []
    with machine.cluster(*flags):
        workers = machine.workers()
        machine.must("verify", machine.name, "--memory", "both", timeout=600)
        rows = machine.links("--size", "64MiB", "--rounds", "3")
        machine.report["links"] = rows
        copies = machine.report.get("copies_gb_per_s", {})
        ratios = []
        for row in rows:
            direct = copies.get(f"{row['from'][3:]}-{row['to'][3:]}")
            if direct and row["gb_per_s"]:
                ratios.append(row["gb_per_s"] / direct)
        slow = [f"{row['from']} to {row['to']}: {row['verdict']}" for row in rows if row["verdict"] != "ok"]
        if slow and not STAND_IN:
            raise Failed("; ".join(slow[:3]))
        machine.transpose(2 * workers, 512, 2, "--check")
        share = (
            f", {sorted(ratios)[len(ratios) // 2]:.2f} of the driver's own copy in the middle"
            if ratios
            else ""
        )
        return f"{workers} workers, {len(rows)} ways{share}"


@check("all GPUs again after a kill", "a worker that comes back reaches every other over the same lanes")
def all_again(machine: Machine) -> None:
    several(machine)
    with machine.cluster(deaths=len(machine.gpus)):
        victim = machine.state()["workers"][-1]
        os.kill(victim["pid"], signal.SIGKILL)
        for _ in range(120):
            state = machine.state()
            if state["state"] == "ready" and state["workers"][-1]["pid"] not in (None, victim["pid"]):
                break
            time.sleep(0.5)
        else:
            raise Failed(f"{victim['name']} is not back after a minute")
        machine.must("verify", machine.name, "--memory", "device", "--to", victim["name"], timeout=300)


@check("GPUDirect RDMA", "NICs can read GPUs: nvidia_peermem or dma-buf is there, ports open, lanes are rc")
def rdma(machine: Machine) -> str:
    if not machine.topo["nics"]:
        raise NotChecked("no InfiniBand or RoCE adapter")
    root = os.environ.get("CUDA_CLUSTER_SYSFS", "/sys")
    # Who has registered, not which module is loaded.
    peers = Path(root, "kernel/mm/memory_peers")
    peermem = peers.is_dir() and any(peers.iterdir())
    with Asked("") as asked:
        buffers = [asked("attribute", gpu["pci"], 124) for gpu in machine.gpus]
    if not peermem and not all(buffers):
        raise Failed(
            "neither nvidia_peermem is registered nor dma-buf supported: NICs get device memory through the host"
        )
    how = "nvidia_peermem" if peermem else "dma-buf"
    if STAND_IN:
        return f"{how}; ports are not opened on a stand-in"
    with machine.cluster("--enable-infiniband", "--net-devices", "auto"):
        missing = [port for worker in machine.state()["workers"] for port in worker.get("missing_ports", [])]
        if missing:
            raise Failed(f"planned, but not opened: {missing[0]['port']}: {missing[0]['why']}")
        machine.must("verify", machine.name, "--memory", "both", timeout=600)
    return how


@check("Dask", "workers are forked, on the GPUs of the plan, and device memory goes between them")
def dask(machine: Machine) -> None:
    if subprocess.run([sys.executable, "-c", "import distributed"], capture_output=True).returncode != 0:
        raise NotChecked(f"{sys.executable} has no distributed")
    with machine.cluster("--engine", "dask", "--python", sys.executable):
        log = machine.must("logs", machine.name)
        for line in log.splitlines():
            if "executed, not forked" in line:
                raise Failed(line.strip())


for _what, _why in (
    ("kernels", "machine code of NVRTC: a program with CudaTask has to be run by hand"),
    ("MIG", "its settings are left alone"),
    ("a GPU that fails (Xid) while workers use it", "nobody can make one fail"),
):

    def _left(_machine: Machine, why: str = _why) -> None:
        raise NotChecked(why)

    check(_what, "")(_left)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve")
    parser.add_argument("--ucx", default="auto")
    parser.add_argument("--report", default="gpu-check.json")
    parser.add_argument("--only", help="checks, with commas between them")
    parser.add_argument("binary", nargs="?")
    asked = parser.parse_args()
    if asked.serve is not None:
        serve(asked.serve)
        return 0
    machine = Machine(asked.binary, asked.ucx)
    outcomes = []
    begun = time.monotonic()
    try:
        machine.topo = json.loads(machine.must("topo", "-o", "json"))
        machine.report["machine"] = json.loads(machine.must("topo", "-o", "json", "--anonymize"))
    except Failed as error:
        print(f"FAILED    topo: {error}")
        return 1
    machine.report["program"] = machine.must("--version").strip()
    for what, proves, function in CHECKS:
        start = time.monotonic()
        try:
            if asked.only and what not in asked.only.split(","):
                raise NotChecked("not asked for")
            told = function(machine)
            outcome, text = "ok", told or ""
        except NotChecked as error:
            outcome, text = "not checked", str(error)
        except Failed as error:
            outcome, text = "FAILED", str(error)
        except (OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as error:
            outcome, text = "FAILED", f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - start, 1)
        outcomes.append(
            {"check": what, "proves": proves, "outcome": outcome, "text": text, "seconds": seconds}
        )
        if outcome != "not checked":
            print(f"{outcome:8}  {what}" + (f": {text}" if text else ""), flush=True)
            if proves and outcome == "ok":
                print(f"          ({proves})", flush=True)
    machine.report["checks"] = outcomes
    machine.report["seconds"] = round(time.monotonic() - begun, 1)
    Path(asked.report).write_text(json.dumps(machine.report, indent=1) + "\n")
    count = {
        word: sum(one["outcome"] == word for one in outcomes) for word in ("ok", "FAILED", "not checked")
    }
    print(
        f"\n{count['ok']} passed, {count['FAILED']} failed, in {machine.report['seconds']:.0f} s; {asked.report} has all of it"
    )
    for one in outcomes:
        if one["outcome"] == "not checked":
            print(f"not checked: {one['check']}: {one['text']}")
    return 1 if count["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
