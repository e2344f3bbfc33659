"""Bad days of the hosts of one Dask cluster: faults at random seconds, under work whose results are known.

A round is a graph of tasks and some faults. Afterwards every result is right, or was lost as it must be with
a clear error; nothing has waited for more than a minute beyond the faults; and whatever ended says why. Then
the hosts are brought back for the next round. `scripts/hosts-lab.sh` runs many; `test_bad_days.py` a few.

*Invariant:* a seed gives the same work and the same faults.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import random
import signal
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field

from distributed import Client, Future
from distributed.scheduler import KilledWorker
from lab_cluster import Cluster, Ended
from lab_hosts import Host
from lab_work import both, digest, piece

PATIENCE = 60.0  # Seconds beyond the last fault.
WHOLE_WITHIN = 240.0  # Seconds until all workers are there again; processes start slowly on a busy machine.
CUT_AFTER = 12.0  # Seconds without an answer after which a connection breaks, in this lab.
# A sender tries again after twice the time each time (0.2 s, 0.4 s …, RFC 6298), so after a network has been
# gone for longer than this, the next try may come too late.
BREAKS_AFTER = CUT_AFTER / 2

# --- The work.


class Work:
    """A random graph: what it must give, and what becomes of it."""

    def __init__(self, chance: random.Random, size: int) -> None:
        self.scattered = {f"data{at}": piece(chance.randrange(1 << 30), 2_000, 0) for at in range(2)}
        self.nodes: dict[str, tuple] = {}
        self.needs_scattered = set(self.scattered)
        for at in range(size):
            name, seconds = f"node{at}", chance.uniform(0, 1.2)
            if at < size // 4:
                count = chance.choice([1_000, 20_000, 100_000])
                self.nodes[name] = (piece, chance.randrange(1 << 30), count, seconds)
                continue
            known = [*self.nodes, *(self.scattered if at % 5 == 0 else ())]
            parents = chance.sample(known, 2)
            self.nodes[name] = (both, *parents, chance.randrange(1, 99), seconds)
            if self.needs_scattered.intersection(parents):
                self.needs_scattered.add(name)

    def expected(self) -> dict[str, tuple[int, int]]:
        known = dict(self.scattered)
        for name, (function, *words, _) in self.nodes.items():
            known[name] = function(*(known.get(word, word) if word in known else word for word in words), 0)
        return {name: digest(known[name]) for name in self.nodes}

    def submit(self, client: Client) -> dict[str, Future]:
        """One future for the digest of each node."""
        known: dict[str, Future] = {}
        for name, data in self.scattered.items():
            [known[name]] = client.scatter([data], hash=False)
        for name, (function, *words) in self.nodes.items():
            known[name] = client.submit(function, *(known.get(word, word) for word in words), pure=False)
        self.held = known  # Workers keep what somebody wants.
        return {name: client.submit(digest, known[name], pure=False) for name in self.nodes}


# --- The faults.


@dataclass
class Fault:
    """What is done to a host: when, and for how long."""

    kind: str
    host: int
    at: float
    lasts: float
    comes_back: bool = True  # The scheduler's host, before the others have given it up.
    ended: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts:.0f} s" if self.lasts else ""
        return f"{self.kind} of host{self.host} after {self.at:.1f} s{lasts}"

    @property
    def of_scheduler(self) -> bool:
        """Whether the scheduler may be gone afterwards, with all that it knew."""
        return self.kind == "scheduler killed" or (
            self.host == 0
            and (
                self.kind in ("power off", "SIGTERM")
                or self.lasts > BREAKS_AFTER
                and self.kind == "no network"
            )
        )

    @property
    def loses_data(self) -> bool:
        """Whether data of which there is one copy may be lost: not if a line is slow only, or a host
        ends in order. Where names are unknown or the disk is full, a worker is killed, too."""
        return self.kind != "slow line" and not (self.kind == "SIGTERM" and self.host != 0)


#: How often each comes, how long each lasts at least and at most, and which hosts may have it.
KINDS: dict[str, tuple[int, float, float, str]] = {
    "power off": (3, 0, 0, "any"),
    "no network": (3, 3, 30, "any"),
    "slow line": (2, 5, 10, "any"),
    "unknown names": (2, 3, 45, "guest"),
    "full disk": (2, 4, 10, "any"),
    "scheduler killed": (2, 0, 0, "home"),
    "SIGTERM": (3, 0, 0, "any"),
    "frozen": (3, 2, 14, "any"),
    "frozen until noticed": (1, 45, 45, "guest"),
}


def faults(chance: random.Random, hosts: int, asked: list[tuple[str, int]] | None = None) -> list[Fault]:
    """Those of a round: one to three, or those asked for, each on a host of its own."""
    weights = [often for often, *_ in KINDS.values()]
    drawn = chance.choices([*KINDS], weights, k=chance.choice([1, 2, 2, 3]))
    free, found = list(range(hosts)), []
    for kind, host in asked or [(kind, None) for kind in drawn]:
        _, least, most, where = KINDS[kind]
        able = [one for one in free if where == "any" or (one == 0) == (where == "home")]
        if host is None and not able:
            continue
        host = chance.choice(able) if host is None else host
        free.remove(host)
        fault = Fault(kind, host, chance.uniform(0, 4), chance.uniform(least, most))
        fault.comes_back = chance.random() < 0.5
        found.append(fault)
    return found


def strike(cluster: Cluster, fault: Fault) -> None:
    """Does it, and undoes it after its time."""
    host = cluster.lab.hosts[fault.host]
    wire = cluster.lab.wire
    time.sleep(fault.at)
    undo = contextlib.ExitStack()
    with undo:
        if fault.kind == "power off":
            host.switch_off()
        elif fault.kind == "no network":
            wire.set(host.address, cut=True)
            undo.callback(wire.set, host.address)
        elif fault.kind == "slow line":
            wire.set(host.address, delay=0.05, loss=0.02)
            undo.callback(wire.set, host.address)
        elif fault.kind == "unknown names":
            host.names_known(False)
            undo.callback(host.names_known, True)
            cluster.kill(host, "gpu0")
        elif fault.kind == "full disk":
            undo.callback(fill(host))
            cluster.kill(host, "gpu0")
        elif fault.kind == "scheduler killed":
            cluster.kill(host, "scheduler")
        elif fault.kind == "SIGTERM":
            cluster.terminate(host)
        else:
            host.freeze(True)
            undo.callback(host.freeze, False)
        time.sleep(fault.lasts)
    fault.ended = time.monotonic()


def fill(host: Host):
    """Fills its disk; returns what makes room again."""
    path = host.path(host.disk) / "full"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 65536):
            pass
    return lambda: path.unlink(missing_ok=True)


# --- A day.


@dataclass
class Diary:
    """What was seen."""

    faults: collections.Counter = field(default_factory=collections.Counter)
    rounds: int = 0
    results: int = 0
    lost: collections.Counter = field(default_factory=collections.Counter)
    reasons: collections.Counter = field(default_factory=collections.Counter)
    ends: collections.Counter = field(default_factory=collections.Counter)
    longest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = lambda counter: "; ".join(f"{many} {what}" for what, many in counter.most_common()) or "none"
        lines = [
            f"{self.rounds} rounds, {self.faults.total()} faults: {count(self.faults)}",
            f"{self.results} right results; lost with an error: {count(self.lost)}",
            f"what the scheduler's host says of those that went: {count(self.reasons)}",
            f"what the ends said: {count(self.ends)}",
            f"longest wait beyond the faults: {self.longest:.0f} s",
            f"wrong results: {len(self.wrong)}; waits too long: {len(self.hung)}; odd: {len(self.odd)}",
        ]
        return "\n".join(lines + self.wrong + self.hung + self.odd)

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.hung or self.odd)


class Day:
    """Rounds on one lab."""

    def __init__(self, cluster: Cluster, seed: int, say=print) -> None:
        self.cluster, self.seed, self.say = cluster, seed, say
        self.diary = Diary()

    def round(self, number: int, asked: list[tuple[str, int]] | None = None) -> None:
        chance = random.Random(f"{self.seed}/{number}")
        work = Work(chance, 60)
        todo = faults(chance, self.cluster.lab.size, asked)
        self.what = f"round {number} of seed {self.seed}: {', '.join(map(str, todo))}"
        begun = time.monotonic()
        with ThreadPoolExecutor(len(todo)) as pool:
            self._work(work, todo, pool)
        self._mend(todo)
        self.diary.rounds += 1
        self.diary.faults.update(fault.kind for fault in todo)
        worked, whole = self.answered - begun, time.monotonic() - begun
        self.say(f"{self.what}: answered after {worked:.0f} s, all back after {whole:.0f} s", flush=True)

    def _work(self, work: Work, todo: list[Fault], pool: ThreadPoolExecutor) -> None:
        expected = work.expected()
        with self.cluster.client() as client:
            futures = work.submit(client)
            striking = [pool.submit(strike, self.cluster, fault) for fault in todo]
            whole = max(fault.at + fault.lasts for fault in todo)
            # While a host is frozen for good, the others have to get on without it.
            until_noticed = any(fault.kind == "frozen until noticed" for fault in todo)
            allowed = time.monotonic() + (0 if until_noticed else whole) + PATIENCE + 15 * until_noticed
            for name, future in futures.items():
                self._look(work, todo, name, future, expected[name], allowed)
            beyond = time.monotonic() - (allowed - PATIENCE)
            self.answered = time.monotonic()
            self.diary.longest = max(self.diary.longest, beyond)
            for strike_ in striking:
                strike_.result()

    def _look(self, work: Work, todo: list[Fault], name: str, future, right, allowed: float) -> None:
        may_lose = any(fault.of_scheduler for fault in todo) or (
            name in work.needs_scattered and any(fault.loses_data for fault in todo)
        )
        try:
            found = future.result(timeout=max(allowed - time.monotonic(), 0.1))
        except (TimeoutError, UnboundLocalError):  # The second is distributed.utils.sync's, seen in 2026.7.
            if not any(line.startswith(self.what) for line in self.diary.hung):
                self.say(self.cluster.looked_at(), flush=True)
            self.diary.hung.append(f"{self.what}: {name} is {future.status}")
        # The scheduler may go while it answers.
        except (CancelledError, KilledWorker, OSError) as error:
            said = f"{type(error).__name__}: {str(error)[-120:]}"
            if not may_lose:
                self.diary.odd.append(f"{self.what}: {name} is lost: {said}")
            self.diary.lost[type(error).__name__] += 1
        except Exception as error:
            self.diary.odd.append(f"{self.what}: {name}: {error!r}")
        else:
            self.diary.results += 1
            if found != right:
                self.diary.wrong.append(f"{self.what}: {name} is {found}, not {right}")

    def _mend(self, todo: list[Fault]) -> None:
        """Brings everything back, and looks at what ended."""
        waits = any(fault.host == 0 and not fault.comes_back for fault in todo)
        ended, whole = self.cluster.bring_back(waits, WHOLE_WITHIN)
        for end in ended:
            self._judge(end, todo)
        if not whole:
            self.diary.hung.append(f"{self.what}: not whole again: {self.cluster.joined()}")
            self.say(self.cluster.looked_at(), flush=True)
            self.cluster.down()
            self.cluster.bring_back(False, WHOLE_WITHIN)
        reasons = self.cluster.reasons()
        self.diary.reasons.update(reasons)
        for reason in reasons:
            if "nobody says why" in reason or "it was removed" in reason:
                self.diary.odd.append(f"{self.what}: the scheduler's host says: {reason}")

    def _judge(self, end: Ended, todo: list[Fault]) -> None:
        struck = {fault.kind for fault in todo if fault.host == end.host}
        if "power off" in struck and end.code == -9:
            return
        self.diary.ends[f"exit {end.code}: {end.cause}"] += 1
        terminated = "SIGTERM" in struck and end.code == 143 and "SIGTERM" in end.cause
        without_scheduler = end.host != 0 and end.code in (0, 6)
        if not (terminated or without_scheduler) or not end.cause:
            self.diary.odd.append(f"{self.what}: host{end.host} ended: {end}")


def main() -> int:
    """SEED, how many faults, how many hosts, and faults for each round (`frozen@1`)."""
    from conftest import RUNTIME
    from lab_hosts import lab, lab_obstacle
    from pathlib import Path

    if (why := lab_obstacle()) is not None:
        print(f"hosts-lab: {why}", file=sys.stderr)
        return 2
    seed, wanted, hosts = (int(word) for word in sys.argv[1:4])
    words = [word.rpartition("@") for word in sys.argv[4:]]
    asked = [(kind, int(host)) for kind, _, host in words] or None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    logging.disable(logging.CRITICAL)  # What clients say of connections that break.
    with lab(hosts, seed, Path(RUNTIME)) as made:
        cluster = Cluster(made)
        day = Day(cluster, seed)
        number = 0
        try:
            cluster.bring_back(False, 300)
            while day.diary.faults.total() < wanted and len(day.diary.odd + day.diary.hung) < 20:
                day.round(number, asked)
                number += 1
            left = cluster.down()
        finally:
            print(day.diary, flush=True)
        print(f"left on the hosts: {left or 'nothing'}")
    return 0 if day.diary.is_good and not left else 1


if __name__ == "__main__":
    sys.exit(main())
