"""`SLURMCluster`: dask-jobqueue's, whose jobs are whole machines with a worker for each GPU.

    from cuda_cluster.dask.jobqueue import SLURMCluster     # was: from dask_jobqueue import SLURMCluster

    cluster = SLURMCluster(gpus=8, walltime="02:00:00", interface="ib0")
    cluster.adapt(minimum=8, maximum=64)

A job runs `cuda-cluster up --join` for its machine. Before it is ended, its workers hand their data on;
of one that ends by itself the batch system is asked why. Needs dask-jobqueue.

*Invariant:* a job has all of its workers or is ended: `scale` and `adapt` count whole jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import dask
from dask_jobqueue import slurm
from distributed import Adaptive, Status
from tornado.ioloop import PeriodicCallback

logger = logging.getLogger("distributed.deploy.cuda_cluster")

#: Seconds between two looks at jobs of which no worker is there.
LOOK = 5

#: Seconds in which the workers of a job that is to end hand their data on.
HANDING_ON = 300

#: Seconds in which a job ends whose workers have left.
ENDING = 30

#: How Slurm calls jobs that have not ended.
GOING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STAGE_OUT"}


class SLURMJob(slurm.SLURMJob):
    """A job of Slurm: a machine, or so much of it as `cores` and `memory` say."""

    def __init__(
        self,
        scheduler: Any = None,
        name: Any = None,
        *,
        gpus: int,
        cores: int | None = None,
        memory: Any = None,
        job_mem: Any = None,
        job_extra_directives: Iterable[str] | None = None,
        job_script_prologue: Iterable[str] | None = None,
        worker_extra_args: Iterable[str] | None = None,
        processes: int | None = None,
        **kwargs: Any,
    ) -> None:
        def configured(what: str, given: Iterable[str] | None) -> list[str]:
            name = f"jobqueue.{kwargs.get('config_name') or self.config_name}.{what}"
            return list(dask.config.get(name, None) or () if given is None else given)

        directives = ["--nodes=1", f"--gpus-per-node={gpus}"]
        # A job that has a machine alone is given all of its GPUs.
        workers = ["--nworkers", str(processes or gpus)]
        arguments = [*workers, *configured("worker-extra-args", worker_extra_args)]
        if cores is None and memory is None:
            directives.append("--exclusive")
        if memory is None:
            # All of the machine's, and each worker a share that the plan gives it.
            job_mem, arguments = job_mem or "0", ["--memory-limit", "auto", *arguments]
        super().__init__(
            scheduler,
            name,
            cores=cores or gpus,
            memory=memory or "1GB",
            job_mem=job_mem,
            processes=processes or gpus,
            job_extra_directives=[*directives, *configured("job-extra-directives", job_extra_directives)],
            # Slurm tells all processes of a job to end. Its shell would be the first, and Slurm would
            # then kill the rest.
            job_script_prologue=[
                "trap : TERM",
                *configured("job-script-prologue", job_script_prologue),
            ],
            worker_extra_args=arguments,
            **{"worker_command": "cuda_cluster.cli", **kwargs},
        )
        #: Why it ended, if nobody asked it to.
        self.cause: str | None = None
        #: Whether one of its workers has been at the scheduler.
        self.was_there = False
        self.is_asked = False

    async def close(self) -> None:
        self.is_asked = True
        cluster = self._cluster() if getattr(self, "_cluster", None) is not None else None
        if cluster is not None and cluster.status == Status.running and self.job_id:
            await cluster._hand_on(self)
        await super().close()

    async def look(self) -> dict[str, str]:
        """What Slurm knows of it; empty if it does not any more."""
        if not self.job_id:
            return {}
        try:
            said = await self._call(["scontrol", "show", "job", "--oneliner", self.job_id])
        except (OSError, RuntimeError):
            return {}
        return dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", said))

    async def has_ended(self) -> bool:
        """Whether it has ended; then `cause` has the reason, unless it was asked to."""
        known = await self.look()
        if not known or known.get("JobState") in GOING:
            return False
        if not self.is_asked and self.cause is None:
            self.cause = told(self.job_id, self.name, known)
        return True


def told(job: str, name: Any, known: dict[str, str]) -> str:
    """Why a job has ended, as Slurm and the program say it."""
    reason, node = known.get("Reason", "None"), known.get("NodeList", "")
    parts = [f"job {job} ({name})", f"on {node}" if node not in ("", "(null)") else "", "has ended:"]
    parts += [known.get("JobState", "?"), f"({reason})" if reason != "None" else ""]
    parts.append(f"with exit code {known.get('ExitCode', '?').partition(':')[0]}")
    parts.append(f"after {known.get('RunTime', '?')} of {known.get('TimeLimit', '?')}")
    text = " ".join(filter(None, parts))
    path = known.get("StdErr") or known.get("StdOut") or ""
    # Slurm tells it as it was asked for.
    path = re.sub("%[Jj]", job, path)
    if not path:
        return text
    errors: list[str] = []
    with contextlib.suppress(OSError):
        errors = re.findall(r"^(?:Error|error): .*", Path(path).read_text(errors="replace"), re.MULTILINE)
    return f"{text}; {errors[-1]}" if errors else f"{text}; its output is in {path}"


class WholeJobs(Adaptive):
    """Adapts by jobs: all workers of one come and go together."""

    async def target(self) -> int:
        size = self.cluster.workers_of_a_job
        return -(-int(await super().target()) // size) * size

    async def scale_down(self, workers: Iterable[str]) -> None:
        cluster = self.cluster
        asked = Counter(cluster.job_of(worker) for worker in workers)
        jobs = [job for job, _ in asked.most_common(asked.total() // cluster.workers_of_a_job)]
        if jobs:
            await super().scale_down([worker for job in jobs for worker in cluster.workers_of(job)])


class _JobOf:
    """A worker's job, by the worker's name. Dask's scheduler is in this process."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, worker: Any) -> str:
        return job_of(str(worker.name), self._size)


def job_of(worker: str, size: int) -> str:
    """The job's name, of which a worker's name is made if it has several."""
    return worker.rpartition("-")[0] if size > 1 else worker


class SLURMCluster(slurm.SLURMCluster):
    """`dask_jobqueue.SLURMCluster`, of jobs that have `gpus` GPUs each: whole machines, unless `cores`
    or `memory` are given, which mean what they mean there.

    `scale` and `adapt` count workers, one for each GPU, and start or end whole jobs. Why a job has ended
    that nobody asked to is told as an error, and stands in `get_logs()` and in `job_ends`.
    """

    job_cls = SLURMJob

    def __init__(self, n_workers: int = 0, *, gpus: int, **kwargs: Any) -> None:
        if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
            raise ValueError(f"gpus must be the number of GPUs of each job, from 1 on, not {gpus!r}")
        #: Why jobs have ended that nobody asked to, by their numbers.
        self.job_ends: dict[str, str] = {}
        kwargs.setdefault("processes", gpus)
        super().__init__(n_workers, gpus=gpus, **kwargs)

    async def _start(self) -> None:
        await super()._start()
        callback = PeriodicCallback(self._look, LOOK * 1000)
        self.periodic_callbacks["jobs"] = callback
        callback.start()

    @property
    def workers_of_a_job(self) -> int:
        return int(self._job_kwargs["processes"])

    def job_of(self, worker: str) -> str:
        """The name of a worker's job."""
        return job_of(str(worker), self.workers_of_a_job)

    def workers_of(self, job: str) -> list[str]:
        """The names of a job's workers."""
        size = self.workers_of_a_job
        return [f"{job}-{number}" for number in range(size)] if size > 1 else [job]

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """As `distributed`'s, by whole jobs: `minimum` is rounded up to them, `maximum` down."""
        size = self.workers_of_a_job
        for bound in ("minimum", "maximum"):
            if kwargs.get(f"{bound}_jobs") is not None:
                kwargs[bound] = kwargs.pop(f"{bound}_jobs") * size
        if kwargs.get("minimum") is not None:
            kwargs["minimum"] = -(-int(kwargs["minimum"]) // size) * size
        if kwargs.get("maximum") is not None:
            kwargs["maximum"] = int(kwargs["maximum"]) // size * size
            if kwargs["maximum"] < max(size, kwargs.get("minimum") or 0):
                raise ValueError(f"maximum must allow whole jobs of {size} workers, and those of minimum")
        kwargs.setdefault("Adaptive", WholeJobs)
        return super().adapt(*args, worker_key=_JobOf(size), **kwargs)

    def _there(self, job: SLURMJob) -> list[str]:
        """The workers of a job that the scheduler has."""
        names = set(self.workers_of(str(job.name)))
        known = self.scheduler_info["workers"].values()
        return [str(worker["name"]) for worker in known if str(worker["name"]) in names]

    async def _hand_on(self, job: SLURMJob) -> None:
        """Has a job's workers hand their data on, and end; and with them, the job."""
        workers = self._there(job)
        if not job.was_there or (workers and len(workers) == len(self.scheduler_info["workers"])):
            return  # There is nothing, or nobody who would take it.

        async def hand_on() -> None:
            # Those of `adapt` have done so.
            ask = self.scheduler_comm.retire_workers
            gone = await ask(names=workers, remove=True, close_workers=True) if workers else {}
            if len(gone) == len(workers):
                await asyncio.wait_for(ended(), ENDING)

        async def ended() -> None:
            while not await job.has_ended():
                await asyncio.sleep(0.2)

        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await asyncio.wait_for(hand_on(), HANDING_ON)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op == "add":
            for worker in msg["workers"].values():
                job = self.workers.get(self.job_of(worker["name"]))
                if job is not None:
                    job.was_there = True
        super()._update_worker_status(op, msg)

    async def _look(self) -> None:
        """Looks at the jobs of which no worker is there."""
        for job in list(self._created):
            if job.cause is not None or job.is_asked or not job.job_id or self._there(job):
                continue
            if await job.has_ended() and job.cause is not None:
                self.job_ends[job.job_id] = job.cause
                self._cluster_manager_logs.append((datetime.now(), job.cause))
                logger.error("%s", job.cause)
                # Another may take its place, unless it is likely to end like this one.
                if job.was_there and self.workers.get(job.name) is job:
                    del self.workers[job.name]
                    job.status = Status.closed
