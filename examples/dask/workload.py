"""What the workloads have in common: a cluster or the address of one, a scale, and whether the result is
right.

    python examples/dask/svd.py                          a cluster of this machine's GPUs
    python examples/dask/svd.py --simulate               of GPUs that are not there
    python examples/dask/svd.py --scale 0.05 tcp://127.0.0.1:8786
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from distributed import Client


#: Of a smaller share some workloads have no data, whose result would always be right.
SMALLEST = 0.001


class Workload(NamedTuple):
    #: What is done, in a few words.
    title: str
    #: What it is at scale 1, and where that comes from.
    full: str
    #: Makes the data; takes the client and the scale.
    make: Callable[[Client, float], Any]
    #: Computes a small result; takes the client and the data.
    run: Callable[[Client, Any], Any]
    #: The same result without Dask; takes the scale.
    expected: Callable[[float], Any]
    #: How near it comes, relatively; none where sums are of whole numbers.
    tolerance: float = 1e-8

    def check(self, found: Any, expected: Any) -> None:
        """Raises `AssertionError` if the result is another."""
        np.testing.assert_allclose(
            np.asarray(found, dtype=float), np.asarray(expected, dtype=float), rtol=self.tolerance, atol=1e-9
        )


def share(text: str) -> float:
    """A scale at which there is something to compute."""
    scale = float(text)
    if not SMALLEST <= scale <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not from {SMALLEST} to 100")
    return scale


def main(workload: Workload) -> None:
    parser = argparse.ArgumentParser(description=f"{workload.title}. At scale 1: {workload.full}.")
    parser.add_argument("address", nargs="?", help="a scheduler's address (default: a cluster of its own)")
    parser.add_argument("--scale", type=share, default=0.02, help="share of the whole size (default: 0.02)")
    parser.add_argument("--simulate", action="store_true", help="GPUs that are not there: a made-up DGX-1")
    options = parser.parse_args()
    if options.address is not None:
        cluster = options.address
    else:
        from cuda_cluster.dask import LocalCUDACluster

        made_up = {"topology": "dgx-1-v100", "simulate": True} if options.simulate else {}
        cluster = LocalCUDACluster(**made_up)
    with Client(cluster) as client:
        data = workload.make(client, options.scale)
        began = time.perf_counter()
        found = workload.run(client, data)
        took = time.perf_counter() - began
        del data
    if options.address is None:
        cluster.close()
    workload.check(found, workload.expected(options.scale))
    print(
        f"{workload.title}: {took:.2f} s at scale {options.scale:g}, and the result is right", file=sys.stderr
    )
