"""The scheduler's ports, which another scheduler that takes its place has again.

*Invariant:* nothing here that chooses a port imports Dask.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, TypedDict

from cuda_cluster_dask import ports

if TYPE_CHECKING:
    from distributed import Scheduler

    from cuda_cluster_dask.settings import SchedulerSettings
    from cuda_cluster_dask.status import Status


class Ports(TypedDict):
    """0 each if there are none."""

    scheduler: int
    dashboard: int


def choose(settings: SchedulerSettings) -> int:
    """The port of the scheduler before this one, which clients know, or else one as asked for.

    Raises StartFailure naming who holds the ports.
    """
    before = _before(settings)["scheduler"]
    if before and ports.is_free(settings, before):
        return before
    return ports.free(settings, settings["ports"], settings["plan"]["scheduler_ports_required"])


def dashboard_address(settings: SchedulerSettings) -> str | tuple[str, int]:
    """Where the dashboard listens: as before, if that port is free."""
    asked = ports.dashboard_address(settings["plan"]["dashboard_address"])
    before = _before(settings)["dashboard"]
    host = asked[0] if isinstance(asked, tuple) else asked.rpartition(":")[0]
    if not before or not ports.is_free_at(host, True, before):
        return asked
    return (host, before) if isinstance(asked, tuple) else f"{host}:{before}"


def _before(settings: SchedulerSettings) -> Ports:
    """The ports of the scheduler that this one takes the place of."""
    found = Ports(scheduler=0, dashboard=0)
    # What a scheduler had not written before it died, nobody has been told.
    with contextlib.suppress(OSError, ValueError), open(settings["ports_file"]) as file:
        found.update(json.load(file))
    return found


def keep(settings: SchedulerSettings, scheduler: Scheduler) -> None:
    """Keeps the ports for the scheduler that takes this one's place."""
    from cuda_cluster_dask.internals import dashboard_port

    with open(settings["ports_file"], "w") as file:
        json.dump({"scheduler": scheduler.port, "dashboard": dashboard_port(scheduler)}, file)


def tell_others(settings: SchedulerSettings, scheduler: Scheduler, status: Status) -> None:
    """Says where it listens on another port than it should: that of the scheduler before, or else
    the one that was asked for."""
    from cuda_cluster_dask.internals import dashboard_port

    before = _before(settings)
    (low, high), port = settings["ports"], scheduler.port
    low, high = (before["scheduler"],) * 2 if before["scheduler"] else (low, high)
    if low and not low <= port <= high:
        status.note(f"port {low} is held by {ports.holder(low)}; the scheduler listens on {port}")
    asked, port = settings["plan"]["dashboard_address"].rpartition(":")[2], dashboard_port(scheduler)
    wanted = before["dashboard"] or (int(asked) if asked.isdigit() else 0)
    if settings["plan"]["dashboard"] and wanted not in (0, port):
        holder = ports.holder(wanted)
        status.note(f"port {wanted} is held by {holder}; the dashboard listens on {port}")
