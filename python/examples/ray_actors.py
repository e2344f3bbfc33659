"""Ray: an actor for each GPU, in both ways. See `cuda_cluster.ray` for which is for whom.

pip install ray
python ray_actors.py
"""

import ray

import cuda_cluster
import cuda_cluster.ray


@ray.remote(num_gpus=1)
class ChosenByRay:
    """Ray chooses the GPU of a process that runs already."""

    def __init__(self) -> None:
        self.bound = cuda_cluster.bind()

    def place(self) -> str:
        return f"{self.bound.worker} cpus {self.bound.cpus}"


@ray.remote
class BornBound:
    """The plan has chosen, and the process began on these CPUs."""

    def place(self) -> str:
        import os

        return f"gpu {os.environ['CUDA_VISIBLE_DEVICES']} cpus {sorted(os.sched_getaffinity(0))}"


def main() -> None:
    gpus = len(cuda_cluster.topology().gpus)
    ray.init(num_gpus=gpus, resources=cuda_cluster.ray.resources(), include_dashboard=False)
    late = [ChosenByRay.options(num_cpus=0).remote() for _ in range(gpus)]
    print(*ray.get([one.place.remote() for one in late]), sep="\n")
    for one in late:
        ray.kill(one)
    born = [BornBound.options(num_cpus=0, **one).remote() for one in cuda_cluster.ray.options()]
    print(*ray.get([one.place.remote() for one in born]), sep="\n")
    ray.shutdown()


if __name__ == "__main__":
    main()
