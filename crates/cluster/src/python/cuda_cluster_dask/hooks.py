"""Where Dask's scheduler decides by one bandwidth for all, and what it decides by instead.

Dask has no hooks there. So methods are replaced in one scheduler, not in its class, and only while its
wires differ (`by_wires.py`): else it is as it came. What is replaced calls what it replaces.

*Invariant:* nothing is replaced in a Dask whose methods are not those of `FACTS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType
from typing import Any

from distributed import Scheduler

from cuda_cluster_dask import wires
from cuda_cluster_dask.wires import Need, Place, Table

#: The newest release whose methods were read, and the oldest.
READ = ("2025.4.0", "2026.8.0")

#: Results of which more than so many are needed are small: Dask's own choice is as good.
MANY = 100

#: So many results on their way to a worker are looked at.
COMING = 200

#: Of more workers, those that are near to what a task needs are looked at.
FEW = 32


@dataclass(frozen=True)
class Fact:
    """A method: its parameters, and what its code names."""

    parameters: str
    names: str


#: What is replaced, and what relies on it, by the names of attributes from a scheduler on.
FACTS = {
    "get_comm_cost": Fact("ts ws", "dependencies has_what get_nbytes bandwidth"),
    "worker_objective": Fact("ts ws", "occupancy nthreads get_comm_cost"),
    "decide_worker_non_rootish": Fact("ts", "running valid_workers worker_objective"),
    "_transition_waiting_processing": Fact("key stimulus_id", "decide_worker_non_rootish"),
    "valid_workers": Fact("ts", "worker_restrictions host_restrictions resource_restrictions"),
    "_calc_occupancy": Fact("task_prefix_count network_occ", "task_prefixes bandwidth"),
    "_get_prefix_duration": Fact("prefix", "duration_average UNKNOWN_TASK_DURATION"),
    "_task_to_msg": Fact("ts", "compute-task who_has nbytes dependencies address"),
    "_add_to_processing": Fact("ts ws stimulus_id", "processing_on _task_to_msg"),
    "gather_on_worker": Fact("worker_address who_has", "gather add_replica"),
    "replicate": Fact(
        "keys n workers branching_factor delete stimulus_id", "gather_on_worker workers_list who_has"
    ),
    "extensions.stealing.steal_time_ratio": Fact("ts", "get_nbytes_deps bandwidth"),
    "extensions.stealing.put_key_in_stealable": Fact("ts", "steal_time_ratio"),
    "extensions.stealing.balance": Fact("", "get_comm_cost _get_thief move_task_request"),
    "extensions.stealing.stealing_objective": Fact("ts ws occupancies", "get_comm_cost"),
}

#: Attributes that are read, by class.
READS = {
    "TaskState": "dependencies who_has processing_on actor key get_nbytes get_nbytes_deps",
    "WorkerState": "address name nthreads metrics needs_what has_what task_prefix_count _network_occ",
}


def strange(scheduler: Scheduler) -> str | None:
    """What of this scheduler is not as it was read; None if all is."""
    for path, fact in FACTS.items():
        owner, name = _owner(scheduler, path)
        if owner is None:
            continue  # Without work stealing.
        if name in vars(owner):
            return f"somebody else has replaced {path}"
        function = inspect.unwrap(getattr(type(owner), name, None) or _nothing)
        if list(inspect.signature(function).parameters)[1:] != fact.parameters.split():
            return f"{path}({', '.join(fact.parameters.split())}) is not there"
        missing = set(fact.names.split()) - _names(function.__code__)
        if missing:
            return f"{path} does not use {', '.join(sorted(missing))}"
    for kind, names in READS.items():
        here = getattr(inspect.getmodule(Scheduler), kind, None)
        for name in names.split():
            if not hasattr(here, name):
                return f"{kind}.{name} is not there"
    return None


def _nothing() -> None: ...


def _owner(scheduler: Scheduler, path: str) -> tuple[Any, str]:
    *owners, name = path.split(".")
    return (scheduler.extensions.get(owners[1]) if owners else scheduler), name


def _names(code: CodeType) -> set[str]:
    """All names and words of a function and what is in it."""
    found = {*code.co_names, *code.co_varnames, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
        elif isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            found.update(one for one in constant if isinstance(one, str))
    return found


@dataclass
class Hooks:
    """What stands in a scheduler for its own methods."""

    scheduler: Any
    table: Table[Any]
    #: The tasks that were placed elsewhere than where Dask would have placed them.
    moved: int = 0
    _own: dict[str, Callable[..., Any]] = field(default_factory=dict)
    #: What comes to each worker, and by what to tell that it is still so.
    _known: dict[Any, tuple[tuple[int, float], dict[Any, float]]] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        return bool(self._own)

    def know(self, table: Table[Any]) -> None:
        """Decides by this table from now on."""
        self.table = table
        self._known.clear()

    def put(self) -> None:
        """Replaces the methods."""
        if self.there:
            return
        replaced: dict[str, Callable[..., Any]] = {
            "get_comm_cost": self.get_comm_cost,
            "decide_worker_non_rootish": self.decide_worker,
            "_task_to_msg": self.task_to_msg,
            "gather_on_worker": self.gather_on_worker,
            "replicate": self.replicate,
            "extensions.stealing.steal_time_ratio": self.steal_time_ratio,
        }
        for path, method in replaced.items():
            owner, name = _owner(self.scheduler, path)
            if owner is not None:
                self._own[path] = getattr(owner, name)
                setattr(owner, name, method)
        self.scheduler.handlers["replicate"] = self.replicate

    def take(self) -> None:
        """Has the scheduler be as it was."""
        for path in self._own:
            owner, name = _owner(self.scheduler, path)
            if owner is not None:
                delattr(owner, name)
        if self.there:
            self.scheduler.handlers["replicate"] = self.scheduler.replicate
        self._own.clear()

    def get_comm_cost(self, ts: Any, ws: Any) -> float:
        """Seconds until all that a task needs is at a worker."""
        table, has, seconds = self.table, ws.has_what, 0.0
        for needed in ts.dependencies:
            if needed not in has:
                seconds += needed.get_nbytes() * table.fastest(needed.who_has or (), ws)
        return seconds

    def decide_worker(self, ts: Any) -> Any:
        """Dask's choice, which is always a worker that holds some of what the task needs; another where
        wires make that clearly sooner."""
        ws = self._own["decide_worker_non_rootish"](ts)
        if ws is None or ts.actor or not 0 < len(ts.dependencies) <= MANY:
            return ws
        if self.get_comm_cost(ts, ws) < wires.AT_LEAST:
            return ws
        places = self._places(ts)
        found = wires.sooner(
            self.table,
            (self._place(ws), list(self._needs(ts, ws))),
            ((self._place(one), self._needs(ts, one)) for one in places if one is not ws),
        )
        if found is None:
            return ws
        self.moved += 1
        return found

    def _places(self, ts: Any) -> Collection[Any]:
        """The workers that a task may run on and that are worth a look."""
        valid = self.scheduler.valid_workers(ts)
        running: Collection[Any] = self.scheduler.running
        places = running if valid is None else valid & running
        if len(places) <= FEW:
            return places
        near = {one for needed in ts.dependencies for one in needed.who_has or ()}
        for holder in list(near):
            near.update(self.table.nearest.get(holder, ()))
        return near.intersection(places)

    def _place(self, ws: Any) -> Place[Any]:
        # Dask takes half a second for a task whose like has never run: that would be longer than most
        # transfers, and hide what these take.
        prefixes = self.scheduler.task_prefixes
        known = ((prefixes[name].duration_average, count) for name, count in ws.task_prefix_count.items())
        busy = sum(seconds * count for seconds, count in known if seconds > 0) / ws.nthreads
        return Place(ws, busy, self._coming(ws))

    def _coming(self, ws: Any) -> dict[Any, float]:
        """Bytes that come to a worker, by sender. Of many decisions in a row, each changes what comes to
        one worker."""
        stamp = len(ws.needs_what), ws._network_occ
        known = self._known.get(ws)
        if known is not None and known[0] == stamp:
            return known[1]
        coming: dict[Any, float] = {}
        for needed in islice(ws.needs_what, COMING):
            sender = self._sender(needed, ws)
            coming[sender] = coming.get(sender, 0.0) + needed.get_nbytes()
        self._known[ws] = stamp, coming
        return coming

    def _needs(self, ts: Any, ws: Any) -> Iterable[Need[Any]]:
        """What a worker lacks for a task. What comes to it anyway is waited for, and comes once."""
        has, coming = ws.has_what, ws.needs_what
        for needed in ts.dependencies:
            if needed in coming:
                yield 0.0, (self._sender(needed, ws),)
            elif needed not in has:
                yield needed.get_nbytes(), needed.who_has or ()

    def _sender(self, needed: Any, ws: Any) -> Any:
        """From whom a worker gets a result."""
        holders = needed.who_has
        if not holders:
            return None
        if len(holders) == 1:
            (holder,) = holders
            return holder
        row, usual = self.table.seconds.get(ws, {}), self.table.usual
        return min(holders, key=lambda holder: row.get(holder, usual))

    def task_to_msg(self, ts: Any) -> Any:
        """What a worker is told of a task: of those who hold what it needs, the fast ones. If they fail,
        the worker asks who else has it."""
        message, ws = self._own["_task_to_msg"](ts), ts.processing_on
        for needed in ts.dependencies if ws is not None else ():
            holders = needed.who_has or ()
            if len(holders) > 1 and ws not in holders:
                good = self.table.good(holders, ws)
                if len(good) < len(holders):
                    message["who_has"][needed.key] = tuple(one.address for one in good)
        return message

    async def gather_on_worker(self, worker_address: str, who_has: dict[Any, list[str]]) -> Any:
        """Copies results to a worker, from those who are fast; of what they have not, from all."""
        ws = self.scheduler.workers.get(worker_address)
        by_wires = who_has if ws is None else {k: self._good(v, ws) for k, v in who_has.items()}
        failed = await self._own_or_its("gather_on_worker")(worker_address, by_wires)
        again = {key: who_has[key] for key in failed if len(by_wires[key]) < len(who_has[key])}
        if again:
            failed = (failed - again.keys()) | await self._own_or_its("gather_on_worker")(
                worker_address, again
            )
        return failed

    def _good(self, addresses: list[str], ws: Any) -> list[str]:
        known = [self.scheduler.workers[one] for one in addresses if one in self.scheduler.workers]
        return [one.address for one in self.table.good(known, ws)] if len(known) > 1 else addresses

    async def replicate(
        self,
        keys: list[Any],
        n: int | None = None,
        workers: Any = None,
        branching_factor: int = 2,
        delete: bool = True,
        stimulus_id: str | None = None,
    ) -> Any:
        """As Dask's, which copies to workers at random; before that to those that are near."""
        own = self._own_or_its("replicate")
        for key in keys if n is None or n > 1 else ():
            await self._spread(own, key, n, workers, branching_factor)
        return await own(keys, n, workers, branching_factor, delete, stimulus_id)

    async def _spread(self, own: Any, key: Any, n: int | None, workers: Any, branching: int) -> None:
        """Copies one result from worker to worker along fast wires, as long as that reaches more."""
        scheduler, table = self.scheduler, self.table
        while (ts := scheduler.tasks.get(key)) is not None and ts.who_has:
            asked = scheduler.running
            if workers is not None:
                asked = {scheduler.workers[one] for one in scheduler.workers_list(workers)}
            open_to = (asked & scheduler.running) - ts.who_has
            left = len(open_to) if n is None else n - len(ts.who_has & asked)
            fast = [one for one in open_to if table.fastest(ts.who_has, one) <= table.least * wires.DIFFER]
            chosen = fast[: max(0, min(left, branching * len(ts.who_has)))]
            if not chosen or len(chosen) == len(open_to):
                return  # Dask's own does the rest as well.
            there = {one.address for one in ts.who_has} | {one.address for one in chosen}
            held = len(ts.who_has)
            try:
                await own([key], len(there), sorted(there), branching, False)
            except KeyError:
                return  # Of these workers one has gone while others' copies were waited for.
            if len(ts.who_has or ()) <= held:
                return

    def _own_or_its(self, name: str) -> Callable[..., Any]:
        """A method of the scheduler's own, also after it was put back while another one awaited."""
        return self._own.get(name) or getattr(type(self.scheduler), name).__get__(self.scheduler)

    def steal_time_ratio(self, ts: Any) -> Any:
        """Dask's, for a thief at the average wire of those who hold what the task needs."""
        own, scheduler = self._own["extensions.stealing.steal_time_ratio"], self.scheduler
        holder = None
        if ts.dependencies and ts.get_nbytes_deps() * self.table.usual >= wires.AT_LEAST:
            largest = max(ts.dependencies, key=lambda one: one.get_nbytes())
            holder = next(iter(largest.who_has or ()), None)
        seconds = self.table.out.get(holder)
        if seconds is None:
            return own(ts)
        usual = scheduler.bandwidth
        try:
            # It reads no other figure of the network, and awaits nothing.
            scheduler.bandwidth = 1 / seconds
            return own(ts)
        finally:
            scheduler.bandwidth = usual
