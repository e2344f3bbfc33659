"""A pool of Python's own, with one worker for each GPU: each takes one in its initializer.

python pool.py
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import cuda_cluster


def begin(waiting: "multiprocessing.Queue[int]") -> None:
    global bound
    bound = cuda_cluster.bind(gpu=waiting.get())


def work(number: int) -> tuple[str, str, int]:
    return bound.worker, bound.cpus, number * number


def main() -> None:
    gpus = [gpu.index for gpu in cuda_cluster.topology().gpus]
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    for gpu in gpus:
        waiting.put(gpu)
    with ProcessPoolExecutor(len(gpus), context, begin, (waiting,)) as pool:
        for worker, cpus, result in pool.map(work, range(4 * len(gpus))):
            print(worker, cpus, result)


if __name__ == "__main__":
    main()
