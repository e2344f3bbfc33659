"""What the wires between workers carry, and where a task has what it needs soonest.

Pure: knows neither Dask nor a clock. Workers are known by names, because those that are started again
have the same wires; a `Table` has them by what calls them at the moment.

*Invariant:* of a pair, what workers have reported goes before what was measured, and that before the plan.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

#: Where a worker's measurements are in its heartbeats: bytes per second by the sender's address.
METRIC = "cuda-cluster-wires"

#: Weight of the newest report.
WEIGHT = 0.3

#: Reports of a pair after which they go before the plan.
ENOUGH = 3

#: How many times as fast as the slow ones the fast pairs must be for anything to be decided by it: loads
#: of a machine make equal wires look twice as fast as others.
DIFFER = 3.0

#: How much sooner a task must have what it needs elsewhere than at a worker that holds some of it, as a
#: share and in seconds: data that goes two ways costs both of its ends.
SOONER, AT_LEAST = 0.8, 0.005

#: So many receivers are near to a sender.
NEAREST = 8

#: A holder that is as fast as this share of the fastest is as good.
AS_GOOD = 0.5

Worker = TypeVar("Worker")


@dataclass
class Pair:
    """What is known of one direction between two workers, in bytes per second."""

    planned: float | None = None
    measured: float | None = None
    learned: float | None = None
    reports: int = 0

    def learn(self, rate: float, count: int) -> None:
        weight = 1 - (1 - WEIGHT) ** count
        known = rate if self.learned is None else self.learned
        self.learned = known + weight * (rate - known)
        self.reports += count


class Wires:
    """All pairs, by the names of the sender and the receiver."""

    def __init__(self, planned: Mapping[str, Mapping[str, float]]) -> None:
        self._pairs: dict[tuple[str, str], Pair] = {}
        for sender, receivers in planned.items():
            for receiver, rate in receivers.items():
                if is_rate(rate):
                    self._pair(sender, receiver).planned = rate

    def _pair(self, sender: str, receiver: str) -> Pair:
        return self._pairs.setdefault((sender, receiver), Pair())

    def learn(self, sender: str, receiver: str, rate: float, count: int = 1) -> None:
        """A receiver has reported so many transfers, whose mean is the rate."""
        if is_rate(rate) and count > 0:
            self._pair(sender, receiver).learn(rate, count)

    def measure(self, sender: str, receiver: str, rate: float) -> None:
        """Somebody has measured a pair that did nothing else."""
        if is_rate(rate):
            self._pair(sender, receiver).measured = rate

    def _level(self) -> float:
        """How fast pairs are in fact, as a share of the plan: most transfers reach less than a wire could
        carry, and the plan's figures for pairs that nothing has used yet are not to look better for it."""
        both = [
            pair.learned / pair.planned
            for pair in self._pairs.values()
            if pair.learned is not None and pair.planned is not None and pair.reports >= ENOUGH
        ]
        return statistics.median(both) if both else 1.0

    def rates(self) -> dict[tuple[str, str], float]:
        """Of each pair of which anything is known, in bytes per second."""
        level, rates = self._level(), {}
        for ends, pair in self._pairs.items():
            if pair.learned is not None and pair.reports >= ENOUGH:
                rates[ends] = pair.learned
            elif pair.measured is not None:
                rates[ends] = pair.measured
            elif pair.planned is not None:
                rates[ends] = pair.planned * level
        return rates


def is_rate(rate: object) -> bool:
    """Whether it can be one: it comes from other processes."""
    return isinstance(rate, (int, float)) and math.isfinite(rate) and rate > 0


@dataclass
class Table(Generic[Worker]):
    """The seconds that a byte takes from each worker to each other, made to be looked into often."""

    #: By receiver and sender.
    seconds: dict[Worker, dict[Worker, float]] = field(default_factory=dict)
    #: For a pair that is not known.
    usual: float = 0.0
    #: Of the fastest pair.
    least: float = 0.0
    #: From a sender to the others on average.
    out: dict[Worker, float] = field(default_factory=dict)
    #: The receivers that a sender reaches fastest.
    nearest: dict[Worker, list[Worker]] = field(default_factory=dict)
    #: Whether some pairs are so much faster than others that it decides.
    differ: bool = False

    @classmethod
    def of(cls, rates: Mapping[tuple[str, str], float], workers: Mapping[str, Worker]) -> Table[Worker]:
        """The table of the workers that are there, by their names."""
        table: Table[Worker] = cls()
        out: dict[Worker, list[tuple[float, Worker]]] = {}
        for (sender, receiver), rate in rates.items():
            if sender in workers and receiver in workers and sender != receiver:
                ends = workers[sender], workers[receiver]
                table.seconds.setdefault(ends[1], {})[ends[0]] = 1 / rate
                out.setdefault(ends[0], []).append((1 / rate, ends[1]))
        known = sorted(second for row in table.seconds.values() for second in row.values())
        if known:
            tenth = len(known) // 10
            table.usual, table.least = statistics.median(known), known[0]
            for worker, receivers in out.items():
                receivers.sort(key=lambda one: one[0])
                table.out[worker] = statistics.fmean(seconds for seconds, _ in receivers)
                table.nearest[worker] = [receiver for _, receiver in receivers[:NEAREST]]
            table.differ = known[-1 - tenth] >= DIFFER * known[tenth]
        return table

    def fastest(self, holders: Collection[Worker], receiver: Worker) -> float:
        """Seconds for a byte from the best of those who hold it."""
        row, usual = self.seconds.get(receiver, {}), self.usual
        if len(holders) == 1:
            (holder,) = holders
            return row.get(holder, usual)
        return min([row.get(holder, usual) for holder in holders], default=usual)

    def good(self, holders: Collection[Worker], receiver: Worker) -> list[Worker]:
        """Those of the holders that are about as fast as the fastest: at least one."""
        row, usual = self.seconds.get(receiver, {}), self.usual
        most = self.fastest(holders, receiver) / AS_GOOD
        return [holder for holder in holders if row.get(holder, usual) <= most]


@dataclass
class Place(Generic[Worker]):
    """A worker that a task may run on."""

    worker: Worker
    #: Seconds until it has computed what it has.
    busy: float
    #: Bytes that come to it anyway, by sender.
    coming: dict[Worker, float] = field(default_factory=dict)


#: A result that a task needs and a worker does not have: its bytes and who holds it.
Need = tuple[float, Collection[Worker]]


def arrival(
    table: Table[Worker], place: Place[Worker], needs: Iterable[Need[Worker]], limit: float = math.inf
) -> float:
    """Seconds until a place has what is needed: wires work side by side, each on one thing after the
    other. More than the limit may be too little."""
    row, usual = table.seconds.get(place.worker, {}), table.usual
    coming, latest = dict(place.coming), 0.0
    for size, holders in needs:
        soonest, sender = math.inf, None
        for holder in holders:
            seconds = (coming.get(holder, 0.0) + size) * row.get(holder, usual)
            if seconds < soonest:
                soonest, sender = seconds, holder
        if sender is not None:
            coming[sender] = coming.get(sender, 0.0) + size
            latest = max(latest, soonest)
            if latest > limit:
                break
    return latest


def sooner(
    table: Table[Worker],
    usual: tuple[Place[Worker], Iterable[Need[Worker]]],
    others: Iterable[tuple[Place[Worker], Iterable[Need[Worker]]]],
) -> Worker | None:
    """The place that has what a task needs clearly sooner than the usual one, and does not begin it later;
    None if there is none. Each comes with what it lacks."""
    came = arrival(table, *usual)
    begin = max(came, usual[0].busy)
    limit = min(came * SOONER, came - AT_LEAST)
    best = math.inf
    found = None
    for place, needs in others:
        # Who computes more is no place for it, but to take computing off a worker is not the point here:
        # how long tasks take is often a guess, and work stealing is for that.
        if place.busy > begin:
            continue
        comes = arrival(table, place, needs, limit)
        if comes <= limit and comes < best:
            best, found = comes, place.worker
    return found
