"""Tasks that do nothing, on Ray: the counterpart of `cuda-cluster bench tasks`."""

import bench_tasks
import ray


@ray.remote
def noop():
    return None


def run(_, count):
    references = [noop.remote() for _ in range(count)]
    ray.get(references)
    return references


def main() -> None:
    asked = bench_tasks.arguments()
    ray.init(
        num_cpus=asked.workers, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    bench_tasks.report(ray.__version__, asked, run)
    ray.shutdown()


if __name__ == "__main__":
    main()
