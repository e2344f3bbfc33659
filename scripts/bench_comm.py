"""Measures Dask's messages from worker to worker: `bench_comm.py TURNS [CANDIDATE ...]`.

Candidates: tcp, native, fresh (native, without memory that is used again), ucxx (distributed-ucxx
with a thread for progress, its better mode). Each turn runs them one after the other, each with two
workers and a scheduler of its own. Data are random and made before the clock runs, which stops when
the result of a task that needs them on the other worker is back. Prints the medians over the turns
of each turn's median, the CPU time of both workers, and the ratios to tcp.
"""

import json
import os
import statistics
import subprocess
import sys
import time

MIB = 1 << 20

#: Name, size of an array in bytes, how many at once, how often.
MOVES = [
    ("256 MiB", 256 * MIB, 1, 7),
    ("16 x 16 MiB", 16 * MIB, 16, 7),
    ("256 x 1 MiB", MIB, 256, 5),
    ("2000 x 64 KiB", 64 << 10, 2000, 3),
    ("1 MiB", MIB, 1, 20),
]
WARM_UP = 2

ENVIRONMENT = {
    "tcp": {},
    "native": {},
    "fresh": {"DASK_DISTRIBUTED__COMM__NATIVE__KEEP_MEMORY": "0"},
    "ucxx": {"UCXPY_PROGRESS_MODE": "thread", "UCXPY_ENABLE_PYTHON_FUTURE": "1"},
}


def used():
    """CPU seconds of this process."""
    return sum(os.times()[:2])


def make(size, seed):
    import numpy

    return numpy.random.default_rng(seed).integers(0, 255, size, dtype="u1")


def count(*arrays):
    return sum(len(array) for array in arrays)


def moved(client, one, other, size, many, turn):
    """Seconds to move so many arrays, and CPU seconds of both workers."""
    from distributed import wait

    key = f"{size}-{many}-{turn}-{time.monotonic_ns()}"
    data = [
        client.submit(make, size, turn * many + seed, workers=[one], key=f"make-{key}-{seed}")
        for seed in range(many)
    ]
    wait(data)
    before = sum(client.run(used).values())
    began = time.perf_counter()
    result = client.submit(count, *data, workers=[other], key=f"count-{key}")
    assert result.result() == size * many
    took = time.perf_counter() - began
    return took, sum(client.run(used).values()) - before


def measure(candidate):
    """One candidate's turn, as JSON."""
    from distributed import Client, LocalCluster

    protocol = {"fresh": "native"}.get(candidate, candidate)
    found = {}
    with (
        LocalCluster(
            protocol=protocol, n_workers=2, threads_per_worker=1, dashboard_address=None,
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
    ):
        one, other = sorted(client.scheduler_info()["workers"])
        for name, size, many, turns in MOVES:
            each = [moved(client, one, other, size, many, turn) for turn in range(turns + WARM_UP)]
            took, cpu = zip(*each[WARM_UP:])
            found[name] = [statistics.median(took), statistics.median(cpu)]
        began = time.perf_counter()
        client.gather(client.map(abs, range(3000), pure=False))
        found["3000 tasks"] = [time.perf_counter() - began, None]
        trips = []
        for number in range(100):
            began = time.perf_counter()
            client.submit(abs, number, pure=False).result()
            trips.append(time.perf_counter() - began)
        found["submit"] = [statistics.median(trips), None]
    print(json.dumps(found))


def turn(candidate):
    environment = {**os.environ, **ENVIRONMENT[candidate]}
    command = [sys.executable, __file__, "--measure", candidate]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        print(f"{candidate} failed: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main(turns, candidates):
    seen = {candidate: [] for candidate in candidates}
    for number in range(turns):
        # The machine's speed changes by the minute: who goes first changes, too.
        for candidate in candidates[number % len(candidates) :] + candidates[: number % len(candidates)]:
            found = turn(candidate)
            if found:
                seen[candidate].append(found)
                line = "  ".join(f"{name} {value[0] * 1e3:.1f}" for name, value in found.items())
                print(f"{candidate:8}{line}", flush=True)
    names = [name for name, *_ in MOVES] + ["3000 tasks", "submit"]
    print(f"{'':14}" + "".join(f"{candidate:>28}" for candidate in candidates))
    for name in names:
        line, base = f"{name:14}", None
        for candidate in candidates:
            values = [found[name] for found in seen[candidate]]
            if not values:
                line += f"{'—':>28}"
                continue
            took = statistics.median(value[0] for value in values)
            cpu = [value[1] for value in values if value[1] is not None]
            cpu = statistics.median(cpu) if cpu else None
            base = base or (took, cpu)
            text = f"{took * 1e3:.1f} ms ({base[0] / took:.2f}x)"
            if cpu is not None:
                text += f" cpu {cpu * 1e3:.0f} ({cpu / base[1]:.2f})"
            line += f"{text:>28}"
        print(line)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(sys.argv[2])
    else:
        main(int(sys.argv[1]), sys.argv[2:] or ["tcp", "native", "fresh", "ucxx"])
