"""Measures Dask's messages from worker to worker: `bench_comm.py TURNS [CANDIDATE ...]`.

Candidates: tcp, direct, copied (direct, without mapped memory), fresh (direct, without memory that
is used again), ucxx (distributed-ucxx with a thread for progress, its better mode), memcpy (nothing
is sent: the worker that has the data copies them into new memory, the least for who copies). Each
has a cluster of its own, all at the same time; they take turns with each single measurement,
because the machine's speed changes by the second. The clock stops when the result of a task that
needs the data on the other worker is back. Data are made before. Prints medians, the CPU time of the
workers, and the ratios to the first candidate: medians of the ratios of each turn.

    bench_comm.py 9 tcp direct                          # worker to worker, two workers
    bench_comm.py --graphs 4 5 tcp direct               # x + x.T and merges, four workers
    bench_comm.py --cold 5 tcp direct                   # new workers, COLD messages of each size

With `--cold`, each turn starts a cluster for each candidate, one after the other, and sends a few
messages of each size in order: at once, and to workers that had nothing to do for some seconds
before. What counts of a turn is their mean, and the first alone.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

MIB = 1 << 20
#: Rounds before those that count: memory is shared only after it has been used some times.
WARM_UP = 5
#: Messages of each size that new workers exchange.
COLD = 3
#: How long new workers have nothing to do before, in seconds.
IDLE = (0, 3)

#: Name, size of an array in bytes, how many at once. Where the name ends in "read", the receiver
#: also reads every byte.
MOVES = {
    "256 MiB": (256 * MIB, 1),
    "256 MiB, read": (256 * MIB, 1),
    "16 x 16 MiB": (16 * MIB, 16),
    "256 x 1 MiB": (MIB, 256),
    "2000 x 64 KiB": (64 << 10, 2000),
    "1 MiB": (MIB, 1),
}
TASKS = ("3000 tasks", "100 submits")
GRAPHS = ("x + x.T", "merge by p2p", "merge by tasks")

ENVIRONMENT = {
    "tcp": {},
    "direct": {},
    "copied": {"DASK_DISTRIBUTED__COMM__DIRECT__ROUTE": "copied"},
    "fresh": {"DASK_DISTRIBUTED__COMM__DIRECT__KEEP_MEMORY": "0"},
    # New memory from the kernel each time, whatever the size.
    "memcpy": {"MALLOC_MMAP_THRESHOLD_": str(32 << 10)},
    "ucxx": {"UCXPY_PROGRESS_MODE": "thread", "UCXPY_ENABLE_PYTHON_FUTURE": "1"},
}


def used():
    """CPU seconds of this process."""
    return time.process_time()


def make(size, seed):
    import numpy

    return numpy.full(size, seed % 251, dtype="u1")


def count(*arrays):
    return sum(len(array) for array in arrays)


def read(*arrays):
    import numpy

    return sum(len(array) for array in arrays if numpy.bitwise_xor.reduce(array.view("u8")) >= 0)


def copy(*arrays):
    """Copies into memory that is new to the process."""
    copies = [array.copy() for array in arrays]
    return count(*copies)


def move(client, workers, size, many, number, task):
    from distributed import wait

    one, other = workers[0], workers[0 if task is copy else 1]
    key = f"{size}-{many}-{number}"
    data = [
        client.submit(make, size, number * many + seed, workers=[one], key=f"make-{key}-{seed}")
        for seed in range(many)
    ]
    wait(data)
    before, began = sum(client.run(used).values()), time.perf_counter()
    result = client.submit(task, *data, workers=[other], key=f"count-{key}")
    assert result.result() == size * many
    took = time.perf_counter() - began
    return took, sum(client.run(used).values()) - before


def tasks(client, name):
    began = time.perf_counter()
    if name == "3000 tasks":
        client.gather(client.map(abs, range(3000), pure=False))
    else:
        for number in range(100):
            client.submit(abs, number, pure=False).result()
    return time.perf_counter() - began


def prepared(name):
    """A graph whose data are made; to be called with the clock running."""
    import dask
    from distributed import wait

    def made(*collections):
        kept = [collection.persist() for collection in collections]
        wait(kept)
        return kept

    if name.startswith("merge by "):
        import dask.datasets

        left, right = made(*(
            dask.datasets.timeseries(
                start="2000-01-01", end="2000-01-17", freq="2s", partition_freq="1d",
                dtypes={"id": int, "x": float}, seed=seed,
            ).assign(key=lambda frame: frame.id * 1000 + frame.x.abs() * 1000 // 1)
            for seed in (1, 2)
        ))  # fmt: skip
        method = {"dataframe.shuffle.method": name.removeprefix("merge by ")}

        def merge():
            with dask.config.set(method):
                made(left.merge(right, on="key"))

        return merge
    import dask.array as array

    random = array.random.default_rng(0).random
    if name == "SVD":
        (tall,) = made(random((200_000, 100), chunks=(10_000, 100)))
        return lambda: made(*array.linalg.svd(tall))
    (x,) = made(random((8000, 8000), chunks=(1000, 1000)))
    return lambda: made(x + x.T)


def graph(name):
    run = prepared(name)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextlib.contextmanager
def cluster_of(protocol, workers):
    """A client of a new cluster, whose workers have one thread each and no limit."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            protocol=protocol, n_workers=workers, threads_per_worker=1, dashboard_address=None,
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
    ):  # fmt: skip
        yield client


def serve(candidate, workers):
    """Answers each measurement that is named on standard input."""
    # UCX writes its warnings to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    protocol = {"fresh": "direct", "copied": "direct", "memcpy": "tcp"}.get(candidate, candidate)
    with cluster_of(protocol, workers) as client:
        names = sorted(client.scheduler_info(n_workers=-1)["workers"])
        for number, line in enumerate(sys.stdin):
            name, cpu = line.strip(), None
            if name in MOVES:
                task = read if name.endswith("read") else count
                task = copy if candidate == "memcpy" else task
                took, cpu = move(client, names, *MOVES[name], number, task)
            elif name in TASKS:
                took = tasks(client, name)
            elif name.startswith("idle "):
                took = float(name.removeprefix("idle "))
                time.sleep(took)
            else:
                took = graph(name)
            print(json.dumps([took, cpu]), file=answers, flush=True)


def start(candidate, workers):
    return subprocess.Popen(
        [sys.executable, __file__, "--serve", candidate, str(workers)],
        env={**os.environ, **ENVIRONMENT[candidate]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ask_process(process, candidate, name):
    process.stdin.write(name + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"{candidate} failed at {name}")
    return json.loads(answer)


def end(running):
    for process in running.values():
        process.stdin.close()
    for candidate, process in running.items():
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            print(f"{candidate} did not end and was killed", file=sys.stderr)
            process.kill()
            process.wait()


def cold(turns, candidates, idle):
    """Prints the median of the turns, and of the first message, in milliseconds."""
    names = [name for name in MOVES if not name.endswith("read")]
    seen = {(candidate, name): [] for candidate in candidates for name in names}
    for turn in range(turns):
        first = turn % len(candidates)
        for candidate in candidates[first:] + candidates[:first]:
            process = start(candidate, 2)
            try:
                ask_process(process, candidate, f"idle {idle}")
                for name in names:
                    took = [ask_process(process, candidate, name)[0] for _ in range(COLD)]
                    seen[candidate, name].append(took)
            finally:
                end({candidate: process})
    print(
        f"new workers, idle for {idle} s, {turns} turns, {COLD} messages of each size: one message of a"
        f" turn, the first alone, medians (of the ratios to {candidates[0]})"
    )
    print(f"{'':15}" + "".join(f"{candidate:>40}" for candidate in candidates))
    for name in names:
        line = f"{name:15}"
        for candidate in candidates:
            pairs = list(zip(seen[candidates[0], name], seen[candidate, name], strict=True))
            text = ""
            for part in (statistics.mean, lambda took: took[0]):
                took = statistics.median(part(found) for _, found in pairs)
                ratio = statistics.median(part(base) / part(found) for base, found in pairs)
                text += f"  {took * 1e3:.1f} ms ({ratio:.2f}x)"
            line += f"{text:>40}"
        print(line, flush=True)


def main(turns, names, workers, candidates):
    running = {candidate: start(candidate, workers) for candidate in candidates}

    def ask(candidate, name):
        return ask_process(running[candidate], candidate, name)

    try:
        print(f"{workers} workers, {turns} turns, medians (of the ratios to {candidates[0]})")
        print(f"{'':15}" + "".join(f"{candidate:>34}" for candidate in candidates), flush=True)
        for name in names:
            seen = {candidate: [] for candidate in candidates}
            for turn in range(-WARM_UP if name in MOVES else -1, turns):
                first = turn % len(candidates)
                for candidate in candidates[first:] + candidates[:first]:
                    found = ask(candidate, name)
                    if turn >= 0:
                        seen[candidate].append(found)
            line = f"{name:15}"
            for candidate in candidates:
                pairs = list(zip(seen[candidates[0]], seen[candidate], strict=True))
                took = statistics.median(found[0] for found in seen[candidate])
                ratio = statistics.median(base[0] / found[0] for base, found in pairs)
                text = f"{took * 1e3:.1f} ms ({ratio:.2f}x)"
                if pairs[0][0][1] is not None:
                    cpu = statistics.median(found[1] for _, found in pairs)
                    less = statistics.median(found[1] / max(base[1], 1e-6) for base, found in pairs)
                    text += f" cpu {cpu * 1e3:.0f} ({less:.2f})"
                line += f"{text:>34}"
            print(line, flush=True)
    finally:
        end(running)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "--graphs":
        candidates = sys.argv[4:] or ["tcp", "direct"]
        main(int(sys.argv[3]), GRAPHS, int(sys.argv[2]), candidates)
    elif sys.argv[1] == "--cold":
        for idle in IDLE:
            cold(int(sys.argv[2]), sys.argv[3:] or ["tcp", "direct"], idle)
    else:
        candidates = sys.argv[2:] or ["tcp", "direct", "copied", "fresh", "ucxx"]
        main(int(sys.argv[1]), [*MOVES, *TASKS], 2, candidates)
