"""Measures what deaths at work cost: `bench_dask_deaths.py ROUNDS TASKS`.

The same two workers, with `distributed.LocalCluster` and with `LocalCUDACluster`, in turns:

- `TASKS` tasks that end their worker (`os._exit`), until the last of them is given up: each ends
  several workers, as `distributed.scheduler.allowed-failures` says;
- a task that needs more memory than its worker may have, until it is given up.

LocalCluster sometimes doesn't end while a worker is being restarted (distributed 2026.7): what is left
of a measurement half a minute later is killed.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile

SCRIPT = """
import json, os, sys, time

TASKS = {tasks}


def end(number):
    os._exit(1)


def fill(number):
    taken = []
    for _ in range(40):
        taken.append(bytearray(b"x" * 50_000_000))
        time.sleep(0.01)
    time.sleep(60)  # A nanny looks ten times a second.


def until_given_up(client, function, tasks):
    from distributed.scheduler import KilledWorker

    client.wait_for_workers(2)
    began = time.monotonic()
    for future in client.map(function, range(tasks)):
        error = future.exception(timeout=900)
        if not isinstance(error, KilledWorker):
            raise RuntimeError(f"not given up: {{error!r}}")
    return time.monotonic() - began


def main():
    from distributed import Client
    {start}
    with cluster, Client(cluster) as client:
        ended = until_given_up(client, end, TASKS)
        filled = until_given_up(client, fill, 1)
        print(json.dumps(dict(ended=ended, filled=filled)), flush=True)


if __name__ == "__main__":
    main()
"""

LIMITS = 'n_workers=2, threads_per_worker=1, memory_limit="500MB"'
STARTS = {
    "LocalCluster": f"""
    from distributed import LocalCluster
    cluster = LocalCluster({LIMITS}, dashboard_address=None)""",
    "cuda-cluster": f"""
    from cuda_cluster.dask import LocalCUDACluster
    cluster = LocalCUDACluster({LIMITS}, dashboard_address=None, protocol="tcp",
                               topology="dgx-a100", simulate=True)""",
}
TITLES = {"ended": "tasks that end their worker, s", "filled": "a task beyond the memory limit, s"}


def measure(name, tasks, folder):
    path = os.path.join(folder, f"with_{name.replace('-', '_')}.py")
    with open(path, "w") as file:
        file.write(SCRIPT.format(tasks=tasks, start=STARTS[name]))
    environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
    with open(os.path.join(folder, "errors"), "w+") as errors:
        running = subprocess.Popen(
            [sys.executable, path],
            env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        found = running.stdout.readline()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            print(f"{name} did not end", file=sys.stderr)
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        if not found:
            errors.seek(0)
            sys.exit(f"{name}: {errors.read()[-2000:]}")
    return json.loads(found)


def main(rounds, tasks):
    found = {name: [] for name in STARTS}
    with tempfile.TemporaryDirectory(prefix="bdd", dir="/tmp") as folder:
        for _ in range(rounds):
            for name in STARTS:
                result = measure(name, tasks, folder)
                print(name, json.dumps(result), file=sys.stderr)
                found[name].append(result)
    print(f"2 workers, {tasks} tasks, median of {rounds}")
    print(f"{'':36}{'LocalCluster':>14}{'cuda-cluster':>14}{'ratio':>8}")
    for key, title in TITLES.items():
        before, now = (statistics.median(one[key] for one in found[name]) for name in STARTS)
        print(f"{title:36}{before:14.2f}{now:14.2f}{now / before:8.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
