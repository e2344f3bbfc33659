"""`Runner`: one script that a batch system starts on each of several machines, and one Dask cluster of
all their GPUs.

    from cuda_cluster.dask import SLURMRunner           # was: from dask_jobqueue.slurm import SLURMRunner

    with SLURMRunner() as runner, Client(runner) as client:     # srun --ntasks-per-node=1 python script.py
        ...

The program decides which process is the first (`cuda-cluster up --join auto`). Processes meet in a
folder that all machines share: each of the others writes beside the scheduler's file that it is there,
or why it is not.

*Invariant:* what follows the constructor runs in the first process alone; the others end there, when
the cluster does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from dask.utils import parse_timedelta
from distributed import Status

from cuda_cluster.cluster import Gathered
from cuda_cluster.dask import keywords
from cuda_cluster.dask.cluster import LocalCUDACluster
from cuda_cluster.errors import ClusterError
from cuda_cluster.model import ClusterState

#: Seconds for which the first waits for the others once its own workers are there.
PATIENCE = 300

#: Seconds for which one that can't start waits for the first, to tell it why.
UNHEARD = 60

#: Seconds between two looks for them.
LOOK = 0.1

#: Options of a scheduler's that are keywords here, by their names there.
OF_SCHEDULERS = {
    **{name: name for name in ("host", "interface", "protocol", "security", "dashboard_address")},
    "dashboard": "dashboard",
    "port": "scheduler_port",
    "scheduler_file": "scheduler_file",
}


class _Finished(Exception):
    """This process is not the one that goes on."""

    def __init__(self, failure: ClusterError | None) -> None:
        super().__init__()
        self.failure = failure

    def exit(self) -> SystemExit:
        """The end of the process, whose cause has been told."""
        if self.failure is None:
            return SystemExit(0)
        print(f"error: {self.failure}", file=sys.stderr, flush=True)
        return SystemExit(self.failure.exit_code or 1)


class Runner(LocalCUDACluster):
    """A Dask cluster of all machines on which a script was started, once on each: with `srun`,
    `mpiexec`, `flux run` or `pbsdsh`.

    The first process gets a scheduler and a worker for each GPU of its machine, and goes on when the
    workers of all machines are there. The others get the workers of theirs; they end in this
    constructor, with the cluster, by `SystemExit`.

    scheduler_file
        The file at which they meet, where all machines see it; of this job alone. By default one in
        the working directory, named after the job. `{job_id}` is the number of a job of Slurm.
    scheduler_options, worker_options, worker_class
        As those of dask-jobqueue's runners: keywords of a scheduler's and of its workers'.
    client
        With False the first process ends here, too, when the cluster does.

    All other keywords are those of `LocalCUDACluster`, for each machine: `n_workers=2` means two on
    each. `interface` is the network between the machines; the default is the one that leads to others.

    Raises ClusterError in the first process if it, or another, can't start.
    """

    _is_used = False

    def __init__(
        self,
        *,
        scheduler: bool = True,
        scheduler_file: str | os.PathLike[str] | None = None,
        scheduler_options: Mapping[str, Any] | None = None,
        worker_class: Any = None,
        worker_options: Mapping[str, Any] | None = None,
        client: bool = True,
        **kwargs: Any,
    ) -> None:
        if not scheduler:
            raise ValueError("scheduler=False: workers of a scheduler elsewhere are those of CUDAWorker")
        if scheduler_file is not None:
            kwargs["scheduler_file"] = self._named(os.fspath(scheduler_file))
        _add(kwargs, "scheduler_options", scheduler_options, OF_SCHEDULERS, known_only=True)
        _add(kwargs, "worker_options", worker_options, {"nthreads": "threads_per_worker"})
        self._wants_client = client
        self._workers_of: dict[int, int] = {}
        super().__init__(worker_class=worker_class, **kwargs)

    def _named(self, file: str) -> str:
        job = os.environ.get("SLURM_JOB_ID")
        if "{job_id}" in file and job is None:
            raise ValueError("scheduler_file has {job_id}, and there is no job of Slurm's")
        return file.replace("{job_id}", job or "")

    def _translate(self, asked: dict[str, Any]) -> keywords.Request:
        if asked.get("security") is True:
            text = "security=True makes certificates that only this process has: give a Security object"
            raise ValueError(text)
        by_user = {name for name in ("name", "protocol", "worker_names") if asked.get(name) is not None}
        request = super()._translate(asked)
        # What machines have in common, and how they reach each other, the program decides.
        request.flags |= {name: None for name in ("name", "worker_names") if name not in by_user}
        if "protocol" not in by_user and request.protocol in ("tcp", "direct"):
            request.flags["protocol"] = None
        request.flags["join"] = "auto"
        return request

    def _begin(self) -> None:
        if Runner._is_used:
            text = "a script has one runner: with the first one, the processes on other machines end"
            raise RuntimeError(text)
        Runner._is_used = True
        _end_in_order()
        try:
            super()._begin()
        except _Finished as finished:
            raise finished.exit() from None
        except KeyboardInterrupt:
            if self._goes_on():
                raise
            raise SystemExit(128 + signal.SIGINT) from None

    def __await__(self) -> Generator[Any, None, Runner]:
        try:
            yield from super().__await__()
        except _Finished as finished:
            raise finished.exit() from None
        return self

    def _place(self) -> Gathered | None:
        return None if self._owned is None else self._owned.gathered

    def _goes_on(self) -> bool:
        """Whether the script goes on in this process; also if nobody knows."""
        place = self._place()
        return place is None or (place.rank == 0 and self._wants_client)

    async def _bring_up(self) -> ClusterState:
        try:
            state = await super()._bring_up()
        except ClusterError as error:
            place = self._place()
            if place is not None and place.rank > 0:
                await _fail(place, error)
            if self._goes_on():
                raise
            raise _Finished(error) from None
        if self._goes_on():
            return state
        place = self._place()
        assert place is not None and self._owned is not None
        if place.rank > 0:
            try:
                _write(place, workers=_ready(state))
            except ClusterError as error:
                raise _Finished(error) from None
        await self._owned.until_ended()
        raise _Finished(self._owned.failure)

    async def _start_once(self) -> None:
        await super()._start_once()
        # Its end is this start's failure meanwhile.
        self.status = Status.starting
        try:
            await self._gather()
        except BaseException:
            if self._relay is not None:
                self._relay.expect_end()
            await self._take_down()
            self.status = Status.failed
            raise
        self.status = Status.running

    async def _take_down(self) -> None:
        await super()._take_down()
        place = self._place()
        if place is not None and place.rank == 0:
            _forget(place)

    async def _gather(self) -> None:
        """Waits until the workers of all machines are there."""
        place, owned, state = self._place(), self._owned, self._state
        assert place is not None and owned is not None and state is not None
        self._workers_of = {0: _ready(state)}
        given = self._request.flags.get("ready_within")
        patience = max(PATIENCE, parse_timedelta(given) if given is not None else 0)
        deadline = time.monotonic() + patience
        while missing := set(range(place.size)) - self._workers_of.keys():
            for rank in missing:
                said = _read(place, rank)
                if said is not None and "failed" in said:
                    raise ClusterError(
                        f"process {rank} of {place.size}, on {said.get('host')}, could not start its workers",
                        causes=[str(said["failed"])],
                    )
                if said is not None:
                    self._workers_of[rank] = int(said["workers"])
            if owned.has_ended:
                raise owned.failure or ClusterError("the cluster ended before all machines were there")
            if time.monotonic() >= deadline:
                ranks = ", ".join(map(str, sorted(missing)))
                raise ClusterError(
                    f"of {place.size} processes {ranks} did not come within {patience:g} s",
                    hint=f"all machines must see {place.file}; what those processes said has the reason",
                )
            await asyncio.sleep(LOOK)

    # What there is.

    @property
    def n_workers(self) -> int:
        """How many workers there are, on all machines."""
        return sum(self._workers_of.values())

    @property
    def world_size(self) -> int:
        """How many processes the script has, and so machines."""
        place = self._place()
        return 1 if place is None else place.size


class SLURMRunner(Runner):
    """`Runner` under the name that dask-jobqueue's has: `srun --ntasks-per-node=1 python script.py`."""


class MPIRunner(Runner):
    """`Runner` for `mpiexec -ppn 1 python script.py`. MPICH's names no job: without a `scheduler_file`,
    the processes agree on a name by mpi4py, if it is installed."""

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("scheduler_file") is None and (agreed := _agreed()) is not None:
            job, rank = agreed
            kwargs["scheduler_file"] = os.path.abspath(f"cuda-cluster-{job}.json")
            kwargs["name"] = kwargs.get("name") or f"job-{job}-{rank}"
        super().__init__(**kwargs)


def _agreed() -> tuple[str, int] | None:
    """A name that all processes of MPI have, and no others; and this one's number."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # It is not installed, or finds no library of MPI's.
        return None
    world = MPI.COMM_WORLD
    return str(world.bcast(uuid.uuid4().hex[:12], root=0)), int(world.Get_rank())


def _add(
    keywords: dict[str, Any],
    what: str,
    options: Mapping[str, Any] | None,
    names: Mapping[str, str],
    known_only: bool = False,
) -> None:
    """Adds options to keywords, under their names here."""
    for option, value in (options or {}).items():
        if known_only and option not in names:
            known = ", ".join(names)
            raise ValueError(
                f"{what}: {option!r} is not one of {known}: the scheduler is a process of its own"
            )
        name = names.get(option, option)
        if keywords.get(name) is not None:
            raise ValueError(f"{name} is given twice, as a keyword and in {what}")
        keywords[name] = value


def _end_in_order() -> None:
    """Has SIGTERM, with which batch systems end jobs, end the script as an exception does, so that its
    cluster ends in order; unless the script handles it itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: object) -> None:
    # Some send it twice, to a step and to its job.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _ready(state: ClusterState) -> int:
    """How many workers there are: others may be planned, and start later."""
    return sum(worker.state == "ready" for worker in state.workers)


async def _fail(place: Gathered, error: ClusterError) -> None:
    """Has the first process know why the workers of this one did not come; unless it does not come
    either, or is gone, and with it the scheduler's file."""
    deadline = time.monotonic() + UNHEARD
    while not os.path.exists(place.file) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK)
    if os.path.exists(place.file):
        with contextlib.suppress(ClusterError):
            _write(place, failed=str(error))


def _write(place: Gathered, **said: Any) -> None:
    """Has the first process know."""
    text = json.dumps({"job": place.job, "host": socket.gethostname(), **said})
    path = Path(f"{place.file}.{place.rank}")
    unfinished = Path(f"{path}.new")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        hint = "name a file in a folder where all machines can write: scheduler_file=…"
        raise ClusterError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def _read(place: Gathered, rank: int) -> dict[str, Any] | None:
    """What another process of this job has said; once."""
    path = Path(f"{place.file}.{rank}")
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        path.unlink()
    return said if isinstance(said, dict) and said.get("job") == place.job else None


def _forget(place: Gathered) -> None:
    """Removes what others have said that nobody read, and the file of a scheduler that was killed."""
    for path in (place.file, *(f"{place.file}.{rank}" for rank in range(1, place.size))):
        with contextlib.suppress(OSError):
            os.unlink(path)
