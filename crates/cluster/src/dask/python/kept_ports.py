"""The scheduler's ports, which another scheduler that takes its place has again.

*Invariant:* nothing here that chooses a port imports Dask.
"""

import contextlib
import json

from cuda_cluster_dask import ports


def choose(settings):
    """The port of the scheduler before this one, which clients know, or else one as asked for.

    Raises StartFailure naming who holds the ports.
    """
    before = _before(settings)["scheduler"]
    if before and ports.is_free(settings, before):
        return before
    return ports.free(settings, settings["ports"], settings["ports_required"])


def dashboard_address(settings):
    """Where the dashboard listens: as before, if that port is free."""
    asked, before = ports.dashboard_address(settings), _before(settings)["dashboard"]
    pair = isinstance(asked, tuple)
    host = asked[0] if pair else asked.rpartition(":")[0]
    if not before or not ports.is_free_at(host, True, before):
        return asked
    return (host, before) if pair else f"{host}:{before}"


def _before(settings):
    """The ports of the scheduler that this one takes the place of; 0 each if there was none."""
    found = {"scheduler": 0, "dashboard": 0}
    # What a scheduler had not written before it died, nobody has been told.
    with contextlib.suppress(OSError, ValueError), open(settings["ports_file"]) as file:
        found |= json.load(file)
    return found


def keep(settings, scheduler):
    """Keeps the ports for the scheduler that takes this one's place."""
    with open(settings["ports_file"], "w") as file:
        json.dump({"scheduler": scheduler.port, "dashboard": dashboard_port(scheduler)}, file)


def dashboard_port(scheduler):
    return scheduler.services["dashboard"].port


def tell_others(settings, scheduler, status):
    """Says where it listens on another port than it should: that of the scheduler before, or else
    the one that was asked for."""
    before = _before(settings)
    (low, high), port = settings["ports"], scheduler.port
    low, high = (before["scheduler"],) * 2 if before["scheduler"] else (low, high)
    if low and not low <= port <= high:
        status.note(f"port {low} is held by {ports.holder(low)}; the scheduler listens on {port}")
    wanted, port = settings["dashboard_address"].rpartition(":")[2], dashboard_port(scheduler)
    wanted = before["dashboard"] or (int(wanted) if wanted.isdigit() else 0)
    if settings["dashboard"] and wanted not in (0, port):
        holder = ports.holder(wanted)
        status.note(f"port {wanted} is held by {holder}; the dashboard listens on {port}")
