"""Tasks that do nothing, on Ray: the counterpart of `cuda-cluster bench tasks`.

Prints one JSON object: tasks per second of the median run.
"""

import argparse
import json
import statistics
import time

import ray


@ray.remote
def noop():
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    ray.init(
        num_cpus=arguments.workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    rates = []
    for _ in range(arguments.runs + 1):
        start = time.perf_counter()
        references = [noop.remote() for _ in range(arguments.count)]
        ray.get(references)
        rates.append(arguments.count / (time.perf_counter() - start))
        del references
    ray.shutdown()
    # The first run warms everything up.
    rate = statistics.median(rates[1:])
    print(json.dumps({"version": ray.__version__, "tasks_per_second": rate, "runs": rates[1:]}))


if __name__ == "__main__":
    main()
