"""A pytest plugin for distributed's own tests: each scheduler places tasks by wires, of which every second
is ten times as fast as the others (`scripts/distributed-by-wires.sh`).

The tests' workers have made-up names and come and go. So a pair's wire is chosen by both names, and known
as soon as there are two workers.
"""

import zlib

from distributed import Scheduler

from cuda_cluster_dask import hooks
from cuda_cluster_dask.by_wires import ByWires
from cuda_cluster_dask.wires import Table

FAST, SLOW = 1e9, 1e8
#: How many schedulers had the hooks, so that a run that never had them does not pass for one.
PUT = 0


def wire(sender, receiver):
    return FAST if zlib.crc32(f"{sender} {receiver}".encode()) % 2 else SLOW


class Made(ByWires):
    """Knows the wires of all workers, and always takes them for different."""

    name = "cuda-cluster-by-wires-of-tests"

    def _decide(self):
        global PUT
        self._due = None
        names = {str(ws.name): ws for ws in self.scheduler.workers.values()}
        rates = {(a, b): wire(a, b) for a in names for b in names if a != b}
        table = Table.of(rates, names)
        table.differ = True
        self.hooks.know(table)
        if not self.hooks.there:
            self.hooks.put()
            PUT += 1


_start = Scheduler.start_unsafe


async def start(self):
    await _start(self)
    reason = hooks.strange(self)
    assert reason is None, reason
    plugin = Made(self, {})
    self.add_plugin(plugin)
    plugin._decide()
    return self


Scheduler.start_unsafe = start


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{PUT} schedulers placed by wires")
