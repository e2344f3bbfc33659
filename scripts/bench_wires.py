"""Dask's tasks placed by the wires between workers against as Dask places them; see bench-wires.sh."""

import contextlib
import os
import signal
import statistics
import sys
import time

import bed
import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import wait

WORKERS = int(os.environ.get("WORKERS", "8"))
TURNS = int(os.environ["TURNS"])
FASTEST = float(os.environ.get("FASTEST", "20e6"))
#: Blocks of x in a row, and rows of a block; parts of the tables, and rows of a part.
BLOCKS, ROWS = 10, int(os.environ.get("ROWS", "500"))
PARTS, PART = 11, int(os.environ.get("PART", "240_000"))


def sums(block):
    """A number that is another if any element is, or two change places."""
    return np.array([[block.ravel() @ np.arange(1, block.size + 1)]])


def transposed(client, turn):
    x = client.persist(da.random.default_rng(turn).random((BLOCKS * ROWS,) * 2, chunks=ROWS))
    wait(x)
    began = time.perf_counter()
    y = client.persist(x + x.T)
    wait(y)
    took = time.perf_counter() - began
    return took, client.compute(y.map_blocks(sums, chunks=(1, 1), dtype=float)).result()


def table(column, turn, number):
    state = np.random.default_rng([turn, number, len(column)])
    keys = state.integers(0, PARTS * PART, PART)
    return pd.DataFrame({"key": keys, column: state.random(PART)})


def merged(how):
    def merge(client, turn):
        with dask.config.set({"dataframe.shuffle.method": how}):
            made = lambda column: dd.from_map(lambda part: table(column, turn, part), range(PARTS))
            left, right = client.persist([made("a"), made("bb")])
            wait([left, right])
            began = time.perf_counter()
            both = client.persist(left.merge(right, on="key"))
            wait(both)
            took = time.perf_counter() - began
            found = (both["a"] * both["bb"]).sum(), both["key"].sum(), both.shape[0]
            return took, np.array(client.gather(client.compute(list(found))))

    return merge


#: What is done, and where Dask's own way is another one, that.
WORK = {
    "x + x.T": (transposed, transposed),
    "merge by tasks": (merged("tasks"), merged("tasks")),
    "merge by p2p": (merged("p2p"), merged("p2p")),
    "tasks for p2p": (merged("tasks"), merged("p2p")),
}


ONLY = os.environ["ONLY"].split(",") if "ONLY" in os.environ else list(WORK)


def compare(rows, title, told):
    print(title, flush=True)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(bed.cluster(rows, told=told))
        dasks = stack.enter_context(bed.cluster(rows, by_wires=False))
        if told:
            exact = bed.exactness(dasks, rows, size := int(FASTEST / 20))
            print(
                f"  {size >> 10} KiB take {statistics.median(exact):.3f} times what their wire would take, on the "
                f"median of all pairs; {exact[0]:.3f} to {exact[-1]:.3f}",
                flush=True,
            )
        print(f"  {'':16}{'by wires':>10}{'as Dask':>10}{'times':>7}  {'range':12} moved", flush=True)
        for name, (by_wires, as_dask) in ((name, work) for name, work in WORK.items() if name in ONLY):
            seen = []
            for turn in range(TURNS + 1):
                before = bed.moved(ours) or 0
                # Who is first changes.
                order = [ours, dasks] if turn % 2 else [dasks, ours]
                done = {}
                for client in order:
                    # `wait` otherwise waits on the other client's event loop, which looks once a second.
                    with client.as_current():
                        done[client] = (by_wires if client is ours else as_dask)(client, turn)
                np.testing.assert_allclose(done[ours][1], done[dasks][1], rtol=1e-9)
                moved = (bed.moved(ours) or 0) - before
                if turn > 0:
                    seen.append((done[ours][0], done[dasks][0], moved))
            mine, theirs = (statistics.median(column) for column in list(zip(*seen))[:2])
            ratios = sorted(theirs / mine for mine, theirs, _ in seen)
            print(
                f"  {name:16}{mine:8.2f} s{theirs:8.2f} s{statistics.median(ratios):7.2f}"
                f"  {ratios[0]:.2f}–{ratios[-1]:.2f}   {statistics.median(one[2] for one in seen):g}",
                flush=True,
            )


def main():
    # Its clusters end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    wires = bed.dgx_1(WORKERS, FASTEST)
    whole = f"{WORKERS} workers, medians of {TURNS} turns"
    cases = {
        "told": (wires, f"wires of a DGX-1, the scheduler told of them: {whole}", True),
        "learned": (wires, "the same, the scheduler not told: it learns", False),
        "equal": (bed.equal(WORKERS, FASTEST / 2), "equal wires", True),
    }
    for name in sys.argv[1:] or cases:
        compare(*cases[name])


if __name__ == "__main__":
    main()
