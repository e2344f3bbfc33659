"""Does a cluster's device memory come back? Rounds of transposes, merges under kills, spilling, links
and `verify` on made-up GPUs of small memory, for scripts/gpu-rounds.sh.

*Invariant:* what fails is said with its round; the memory is what the driver counts, of all processes.
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

from gpu_check import MIB, Failed, Machine

ROOT = Path(__file__).resolve().parents[1]

#: Memory of a GPU, by how many there are: small, so that data comes and goes often.
GPU_BYTES = {2: 512 * MIB, 8: 256 * MIB, 16: 256 * MIB}

#: Seconds in which an idle cluster gives back what it does not need: the pool's ten, and three of the
#: supervisor's questions.
SETTLES = 75

#: Freed memory of a GPU that peers may have mapped without the pool's telling it (seen: 24 MiB).
UNSEEN = 32 * MIB

#: What a pool keeps until the end for peers to map instead of larger memory.
PEBBLES = 4 * MIB

#: Seconds for one command.
PATIENCE = 900

#: Kills are many here, and a delay between them shows nothing.
SPEC = "version: 1\nsupervision: {backoff: 50ms, backoff_max: 100ms}\n"


class Rounds(Machine):
    """A made-up machine, and what is run on it."""

    def __init__(self, binary: Path, gpus: int, scratch: Path, seed: int) -> None:
        super().__init__(str(binary), "auto")
        self.random, self.size = random.Random(seed), GPU_BYTES[gpus]
        self.kills = 0
        self.seconds: dict[str, float] = {}
        machine = json.loads(
            self.must("topo", "--topology", "dgx-2" if gpus > 8 else "dgx-h100", "-o", "json")
        )
        machine["gpus"] = [{**gpu, "memory_bytes": self.size} for gpu in machine["gpus"]]
        (scratch / "machine.json").write_text(json.dumps(machine))
        (scratch / "cluster.yaml").write_text(SPEC)
        making = [ROOT / "target/debug/examples/fake-machine", scratch / "machine.json", scratch / "machine"]
        told = subprocess.run(making, check=True, capture_output=True, text=True).stdout
        os.environ.update(line.split("=", 1) for line in told.splitlines() if "=" in line)
        os.environ["XDG_RUNTIME_DIR"] = str(scratch)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self.topo = {**machine, "gpus": machine["gpus"][:gpus]}
        self.spec = str(scratch / "cluster.yaml")

    def counted(self) -> list[int]:
        """What the driver counts of each GPU's memory."""
        return [self.size - free for free in self.free()]

    def until_ready(self) -> None:
        limit = time.monotonic() + 120
        while missing := [one["name"] for one in self.state()["workers"] if one["state"] != "ready"]:
            if time.monotonic() > limit:
                raise Failed(f"not READY again within 2 minutes: {', '.join(missing)}")
            time.sleep(0.1)

    # --- the five kinds of a round -------------------------------------------------------------

    def of_share(self, share: float, check: list[str]) -> None:
        """A transpose with so much of the cluster's device memory in chunks, and as much in their sums."""
        gpus = len(self.gpus)
        chunks = 2 * max(2, round((2 * gpus) ** 0.5))
        self.transpose(chunks, int((share * self.size * gpus / chunks**2 / 8) ** 0.5), 1, *check)

    def merge_under_kills(self, check: list[str]) -> None:
        parts = 2 * len(self.gpus)
        # A single process takes longer than the cluster.
        rows = int((0.02 if check else 0.05) * self.size / 2 / 16)
        words = [
            self.binary,
            "bench",
            "merge",
            self.name,
            "--runs=1",
            f"--parts={parts}",
            f"--rows={rows}",
            *check,
        ]
        merge = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            time.sleep(self.random.uniform(0.05, 0.6))
            victim = self.random.choice(self.state()["workers"])
            if merge.poll() is None and victim["pid"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim["pid"], signal.SIGKILL)
                    self.kills += 1
            said, _ = merge.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(words)}: nothing within {PATIENCE} s") from None
        finally:
            merge.kill()
            merge.wait()
        if merge.returncode != 0:
            raise Failed(
                f"bench merge ended with {merge.returncode}, {victim['name']} killed: {said[-2000:]}"
            )
        self.until_ready()

    def pairs(self, command: str, *words: str) -> list[dict]:
        """The pairs that `verify` or `bench links` measures, in device memory."""
        given = ("--memory", "device", "--rounds", "1", "--budget", "50ms", "-o", "json", *words)
        done = self.run(*command.split(), self.name, *given, timeout=PATIENCE)
        pairs: list[dict] = json.loads(done.stdout)["pairs"] if done.stdout else []
        # On a stand-in every link is slow.
        bad = [pair for pair in pairs if not pair.get("verdict", "ok").startswith(("ok", "slow"))]
        if bad or done.returncode != 0:
            raise Failed(
                f"{command} ended with {done.returncode}: {done.stderr[-2000:]}{json.dumps(bad, indent=1)}"
            )
        return pairs

    # --- a cluster ---------------------------------------------------------------------------------

    def settled(self) -> list[int]:
        """What is counted when the cluster has been idle for a while."""
        time.sleep(SETTLES)
        return self.counted()

    def one(self, number: int, whole: bool) -> None:
        check = ["--check"] if number % 5 == 1 else []
        some = [] if whole else ["--from", f"gpu{self.random.randrange(len(self.gpus))}"]
        for kind, work in {
            "transpose": lambda: self.of_share(0.2, check),
            "merge under kills": lambda: self.merge_under_kills(check),
            "spilling": lambda: self.of_share(0.5, check),
            "bench links": lambda: self.pairs("bench links", "--all", "--size", "64KiB,16MiB", *some),
            "verify": lambda: self.pairs("verify", "--all", *some),
        }.items():
            begun = time.monotonic()
            try:
                work()
            except Failed as failed:
                print(self.run("ps", self.name).stdout, self.run("events", self.name).stdout[-6000:])
                for worker, counted in zip(self.state()["workers"], self.counted(), strict=True):
                    print(f"  {worker['name']}: {counted} bytes counted, {worker['device_pool']}")
                raise Failed(f"round {number}, {kind}: {failed}") from None
            self.seconds[kind] = self.seconds.get(kind, 0) + time.monotonic() - begun

    def all(self, rounds: int, whole_every: int) -> None:
        before = self.counted()
        try:
            self.must(
                "up", "-f", self.spec, "--name", self.name, "--detach", "--enable-nvlink",
                "--n-workers", str(len(self.gpus)), "--device-memory-limit", "0.8",
                # The stand-in's device memory is host memory, and what is mapped counts for each.
                "--memory-limit", "20GiB",
            )  # fmt: skip
            new, early = self.counted(), []
            for number in range(1, rounds + 1):
                self.one(number, (number - 1) % whole_every == 0)
                if number % 20 == 0 or number == rounds:
                    print(f"  {number}: {sum(self.counted()) // MIB} MiB", flush=True)
                if number == min(10, rounds):
                    early = self.settled()
            self.judge(new, early, self.settled())
        finally:
            self.run("down", self.name)
        if (after := self.counted()) != before:
            raise Failed(f"after down {after} bytes are counted, {before} before up")

    def judge(self, new: list[int], early: list[int], counted: list[int]) -> None:
        mib = lambda numbers: [number // MIB for number in numbers]  # noqa: E731
        pools = [worker["device_pool"] for worker in self.state()["workers"]]
        told = [pool["held_bytes"] + pool["freed_but_mapped_bytes"] for pool in pools]
        print("  seconds: " + ", ".join(f"{kind} {spent:.0f}" for kind, spent in self.seconds.items()))
        print(f"  kills {self.kills}; MiB of each GPU: new {mib(new)},")
        print(f"  idle after ten rounds {mib(early)}, idle at the end {mib(counted)}")
        for key in ["held_bytes", "used_bytes", "freed_but_mapped_bytes", "mapped_by_peers_bytes"]:
            print(f"  {key} {mib([pool[key] for pool in pools])}")
        untold = [now - base - known for now, base, known in zip(counted, new, told, strict=True)]
        print(f"  counted and not told {mib(untold)}")
        for at, (pool, missing) in enumerate(zip(pools, untold, strict=True)):
            if pool["used_bytes"]:
                raise Failed(f"gpu{at}: {pool['used_bytes']} bytes in use, and there is no object")
            if missing > UNSEEN:
                raise Failed(f"gpu{at}: {missing} bytes more are counted than new, and not told by the pool")
            if pool["mapped_by_peers_bytes"] == 0 and pool["held_bytes"] > PEBBLES:
                raise Failed(f"gpu{at}: {pool['held_bytes']} bytes are kept, and nobody has them mapped")
        if sum(counted) > sum(early) + len(pools) * 2 * UNSEEN:
            raise Failed("an idle cluster keeps more at the end than after ten rounds")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--gpus", type=int, choices=sorted(GPU_BYTES), action="append")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument(
        "--whole-every", type=int, default=1, help="all pairs in each N-th round, else one worker's"
    )
    options.add_argument("binary", type=Path)
    given = options.parse_args()
    if given.rounds < 1 or given.whole_every < 1:
        options.error("--rounds and --whole-every count from 1")
    if not os.access(given.binary, os.X_OK):
        options.error(f"there is no program at {given.binary}: cargo build --release")
    for gpus in given.gpus or sorted(GPU_BYTES):
        begun = time.monotonic()
        print(
            f"{gpus} GPUs of {GPU_BYTES[gpus] // MIB} MiB, {given.rounds} rounds, seed {given.seed}",
            flush=True,
        )
        with tempfile.TemporaryDirectory(prefix="ccr.", dir="/tmp") as scratch:
            try:
                Rounds(given.binary.resolve(), gpus, Path(scratch), given.seed).all(
                    given.rounds, given.whole_every
                )
            except Failed as failed:
                print(f"  FAILED: {failed}")
                return 1
        print(f"  ok, {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
