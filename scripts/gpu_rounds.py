"""Does a cluster's device memory come back? Rounds of transposes, merges under kills, spilling, links
and `verify` on made-up GPUs of small memory, for scripts/gpu-rounds.sh.

*Invariant:* what fails is said with its round, its command and what it printed; the memory is that
which NVML counts, of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[1]

#: Memory of a GPU, by how many there are: small, so that data comes and goes often.
GPU_BYTES = {2: 512 * MIB, 8: 256 * MIB, 16: 256 * MIB}

#: Seconds in which an idle cluster gives back what it does not need: the pool's ten, and three of the
#: supervisor's questions.
SETTLES = 75

#: Freed memory of a GPU that peers may have mapped without the pool's telling it (seen: 24 MiB).
UNSEEN = 32 * MIB

Pool = dict[str, int]


class Failed(Exception):
    """What is wrong, in words for people."""


class Rounds:
    def __init__(self, binary: Path, gpus: int, scratch: Path, seed: int) -> None:
        self.binary, self.gpus, self.random = binary, gpus, random.Random(seed)
        self.size = GPU_BYTES[gpus]
        machine = json.loads(
            self.output("topo", "--topology", "dgx-2" if gpus > 8 else "dgx-h100", "-o", "json")
        )
        machine["gpus"] = [{**gpu, "memory_bytes": self.size} for gpu in machine["gpus"]]
        description = scratch / "machine.json"
        description.write_text(json.dumps(machine))
        examples = ROOT / "target/debug/examples"
        told = subprocess.run(
            [examples / "fake-machine", description, scratch / "machine"],
            check=True,
            capture_output=True,
            text=True,
        )
        self.environment = {
            **os.environ,
            **dict(line.split("=", 1) for line in told.stdout.splitlines() if "=" in line),
            "XDG_RUNTIME_DIR": str(scratch),
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)
        # Kills are many here, and a delay between them shows nothing.
        self.spec = scratch / "cluster.yaml"
        self.spec.write_text("version: 1\nsupervision: {backoff: 50ms, backoff_max: 100ms}\n")
        self.kills = 0
        self.seconds: dict[str, float] = {}

    def command(self, *words: str) -> subprocess.Popen[str]:
        environment = getattr(self, "environment", None)
        return subprocess.Popen(
            [self.binary, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def output(self, *words: str) -> str:
        process = self.command(*words)
        out, err = self.said(process)
        if process.returncode != 0:
            raise Failed(f"{' '.join(words)}: exit {process.returncode}\n{out[-2000:]}{err[-2000:]}")
        return out

    @staticmethod
    def said(process: subprocess.Popen[str]) -> tuple[str, str]:
        try:
            return process.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise Failed(f"{process.args}: no end within 15 minutes\n{out[-2000:]}{err[-2000:]}") from None

    def workers(self) -> list[dict]:
        return json.loads(self.output("ps", "dev", "-o", "json"))["workers"]

    def pools(self) -> list[Pool]:
        return [worker["device_pool"] for worker in self.workers()]

    def counted(self) -> list[int]:
        """What NVML counts of each GPU's memory, asked by a process of its own."""
        program = (
            "import ctypes, sys\n"
            "class Memory(ctypes.Structure): _fields_ = [(n, ctypes.c_ulonglong) for n in ('total', 'free', 'used')]\n"
            "nvml = ctypes.CDLL('libnvidia-ml.so.1'); assert nvml.nvmlInit_v2() == 0\n"
            f"for at in range({self.gpus}):\n"
            "    handle, memory = ctypes.c_void_p(), Memory()\n"
            "    assert nvml.nvmlDeviceGetHandleByIndex_v2(at, ctypes.byref(handle)) == 0\n"
            "    assert nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0\n"
            "    print(memory.used)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], env=self.environment, check=True, capture_output=True, text=True
        )
        return [int(line) for line in done.stdout.split()]

    def until_ready(self) -> None:
        limit = time.monotonic() + 120
        while any(worker["state"] != "ready" for worker in self.workers()):
            if time.monotonic() > limit:
                raise Failed(f"not READY again: {[(one['name'], one['state']) for one in self.workers()]}")
            time.sleep(0.1)

    # --- the five kinds of a round -------------------------------------------------------------

    def transpose(self, share: float, check: list[str]) -> None:
        """With so much of the cluster's device memory in chunks, and as much in their sums."""
        chunks = 2 * max(2, round((2 * self.gpus) ** 0.5))
        side = int((share * self.size * self.gpus / chunks**2 / 8) ** 0.5)
        self.output(
            "bench",
            "transpose",
            "dev",
            "--runs",
            "1",
            "--chunks",
            str(chunks),
            "--chunk-size",
            str(side),
            *check,
        )

    def merge_under_kills(self, check: list[str]) -> None:
        parts = 2 * self.gpus
        rows = int((0.02 if check else 0.05) * self.size * self.gpus / parts / 16)
        merge = self.command(
            "bench", "merge", "dev", "--runs", "1", "--parts", str(parts), "--rows", str(rows), *check
        )
        time.sleep(self.random.uniform(0.05, 0.6))
        victim = self.random.choice(self.workers())
        if merge.poll() is None and victim["pid"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim["pid"], signal.SIGKILL)
                self.kills += 1
        out, err = self.said(merge)
        if merge.returncode != 0:
            raise Failed(
                f"bench merge: exit {merge.returncode}, {victim['name']} killed\n{out[-2000:]}{err[-2000:]}"
            )
        self.until_ready()

    def links(self, whole: bool) -> None:
        one = [] if whole else ["--from", f"gpu{self.random.randrange(self.gpus)}"]
        self.output(
            "bench",
            "links",
            "dev",
            "--memory",
            "device",
            "--size",
            "64KiB,16MiB",
            "--rounds",
            "1",
            "--budget",
            "50ms",
            "-o",
            "json",
            *one,
        )

    def verify(self, whole: bool) -> None:
        one = [] if whole else ["--from", f"gpu{self.random.randrange(self.gpus)}"]
        verify = self.command(
            "verify", "dev", "--memory", "device", "--rounds", "1", "--budget", "50ms", "-o", "json", *one
        )
        out, err = self.said(verify)
        # On a stand-in every link is slow.
        pairs = [pair for pair in json.loads(out)["pairs"] if not pair["verdict"].startswith(("ok", "slow"))]
        if pairs or verify.returncode != 0:
            raise Failed(f"verify: exit {verify.returncode}, {err[-2000:]}{json.dumps(pairs, indent=1)}")

    def settled(self) -> tuple[list[int], list[Pool]]:
        """What is counted when the cluster has been idle for a while."""
        time.sleep(SETTLES)
        return self.counted(), self.pools()

    def run(self, rounds: int, whole_every: int) -> None:
        self.output(
            "up", "-f", str(self.spec), "--name", "dev", "--detach", "--enable-nvlink", "--n-workers", str(self.gpus), "--device-memory-limit", "0.8",
            # The stand-in's device memory is host memory, and what is mapped counts for each.
            "--memory-limit", "20GiB",
        )  # fmt: skip
        try:
            new = self.counted()
            early: list[int] = []
            for number in range(1, rounds + 1):
                # A single process takes longer than the cluster.
                check = ["--check"] if number % 5 == 1 else []
                whole = number % whole_every == 1 or whole_every == 1
                for kind, work in {
                    "transpose": lambda: self.transpose(0.2, check),
                    "merge under kills": lambda: self.merge_under_kills(check),
                    "spilling": lambda: self.transpose(0.5, check),
                    "bench links": lambda: self.links(whole),
                    "verify": lambda: self.verify(whole),
                }.items():
                    begun = time.monotonic()
                    try:
                        work()
                        self.seconds[kind] = self.seconds.get(kind, 0) + time.monotonic() - begun
                    except Failed as failed:
                        print(self.output("ps", "dev"), self.output("events", "dev")[-6000:])
                        raise Failed(f"round {number}, {kind}: {failed}") from None
                if number % 20 == 0 or number == rounds:
                    print(f"  {number}: NVML counts {sum(self.counted()) // MIB} MiB", flush=True)
                if number == min(10, rounds):
                    early, _ = self.settled()
            counted, pools = self.settled()
            self.judge(new, early, counted, pools)
        finally:
            self.output("down", "dev")
        if (left := sum(self.counted())) > 0:
            raise Failed(f"after down NVML counts {left} bytes")

    def judge(self, new: list[int], early: list[int], counted: list[int], pools: list[Pool]) -> None:
        mib = lambda numbers: [number // MIB for number in numbers]  # noqa: E731
        mapped = [pool["mapped_by_peers_bytes"] for pool in pools]
        print("  seconds: " + ", ".join(f"{kind} {spent:.0f}" for kind, spent in self.seconds.items()))
        print(f"  kills {self.kills}; MiB of each GPU that NVML counts: new {mib(new)},")
        for key in ["held_bytes", "used_bytes", "freed_but_mapped_bytes"]:
            print(f"  {key} {mib([pool[key] for pool in pools])}")
        print(
            f"  idle after 10 rounds {mib(early)}, idle at the end {mib(counted)}; mapped by peers {mib(mapped)}"
        )
        unexplained = []
        for at, (pool, used, base) in enumerate(zip(pools, counted, new, strict=True)):
            if pool["used_bytes"]:
                raise Failed(f"gpu{at}: {pool['used_bytes']} bytes in use, and there is no object")
            told = pool["held_bytes"] + pool["freed_but_mapped_bytes"]
            unexplained.append(used - base - told)
            if used - base > told + UNSEEN:
                raise Failed(f"gpu{at}: NVML counts {used - base} bytes more than new, the pool tells {told}")
            # What nobody has mapped goes back.
            if pool["mapped_by_peers_bytes"] == 0 and pool["held_bytes"]:
                raise Failed(f"gpu{at}: {pool['held_bytes']} bytes are kept, and nobody has them mapped")
        print(f"  counted and not told {mib(unexplained)} MiB")
        if sum(counted) > sum(early) + self.gpus * 2 * UNSEEN:
            raise Failed("an idle cluster keeps more at the end than after ten rounds")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--gpus", type=int, choices=sorted(GPU_BYTES), action="append")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument(
        "--whole-every", type=int, default=1, help="all pairs in each so-many-th round, else one worker's"
    )
    options.add_argument("binary", type=Path)
    given = options.parse_args()
    for gpus in given.gpus or sorted(GPU_BYTES):
        begun = time.monotonic()
        print(
            f"{gpus} GPUs of {GPU_BYTES[gpus] // MIB} MiB, {given.rounds} rounds, seed {given.seed}",
            flush=True,
        )
        with tempfile.TemporaryDirectory(prefix="ccr.", dir="/tmp") as scratch:
            try:
                Rounds(given.binary.resolve(), gpus, Path(scratch), given.seed).run(
                    given.rounds, given.whole_every
                )
            except Failed as failed:
                print(f"  FAILED: {failed}")
                return 1
        print(f"  ok, {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
