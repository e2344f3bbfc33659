"""Objects from one worker to another on Ray: the counterpart of `benches/objects.rs`.

Prints a line of JSON for each size and turn: bytes, and the milliseconds of each step. Ray's
workers map the same shared memory, so nothing is copied on the way; it is copied there once, when
the maker's result is stored.
"""

import argparse
import json
import time

import numpy
import ray

SIZES = (64 << 20, 1 << 30)


@ray.remote
class Worker:
    def make(self, count: int, seed: int) -> numpy.ndarray:
        return numpy.arange(seed, seed + count // 8, dtype=numpy.uint64)

    def look(self, array: numpy.ndarray) -> int:
        return array.nbytes

    def read(self, array: numpy.ndarray) -> int:
        return int(array.sum(dtype=numpy.uint64))


def timed(call, *arguments):
    start = time.perf_counter()
    reference = call.remote(*arguments)
    ray.wait([reference], fetch_local=False)
    return 1e3 * (time.perf_counter() - start), reference


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=4 << 30,
        log_to_driver=False,
        logging_level="error",
    )
    one, other = Worker.remote(), Worker.remote()
    ray.get([worker.look.remote(numpy.zeros(1)) for worker in (one, other)])
    for size in SIZES:
        for seed in range(arguments.turns):
            make, made = timed(one.make, size, seed)
            look, seen = timed(other.look, made)
            read, total = timed(other.read, made)
            count = size // 8
            expected = (count * seed + count * (count - 1) // 2) % 2**64
            assert (ray.get(seen), ray.get(total)) == (size, expected)
            print(json.dumps({"bytes": size, "make": make, "look": look, "read": read}))
            del made, seen, total
    ray.shutdown()


if __name__ == "__main__":
    main()
