"""Measures Dask clusters over several hosts side by side: `bench_hosts.py ROUNDS HOSTS GPUS [CANDIDATE...]`,
in a network of its own and on a made-up machine (`scripts/bench-hosts.sh`).

Each host is a network with an address on one bridge. The clock runs from the first command until a client
has all workers. Memory, while all wait: the sum of the proportional set sizes (PSS) of all that was
started, and what the median worker has for itself. Then the median of three merges of 2 x 2,000,000 rows,
and of three sums of x + x.T of 8000 x 8000 numbers, in as many pieces as there are workers. At last all
are told to end by SIGTERM, until nothing is left.

A candidate that fails is a line of its own, with its last words, and has no figures.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: A range for tests of networks.
ADDRESS = "198.18.251.{}"

CLIENT = """
import json, os, statistics, sys, time
from pathlib import Path
import dask, dask.array, dask.dataframe
import numpy, pandas
from distributed import Client, wait

def sizes(pid):
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    pairs = [line.split()[:2] for line in text.splitlines()[1:]]
    return {key.rstrip(":"): int(value) / 1000 for key, value in pairs}

def memory():
    mark, total = os.environ["BENCH_MARK"].encode(), 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            of_bench = mark in Path(f"/proc/{pid}/environ").read_bytes() and int(pid) != os.getpid()
            total += sizes(pid)["Pss"] if of_bench else 0
        except OSError:
            continue
    return total

def timed(work):
    found = []
    for _ in range(4):  # The first loads what is needed.
        began = time.monotonic()
        work()
        found.append(time.monotonic() - began)
    return statistics.median(found[1:])

workers, file = int(sys.argv[1]), sys.argv[2]
while not os.path.exists(file) or not os.path.getsize(file):
    time.sleep(0.02)
with Client(scheduler_file=file, timeout="300s") as client:
    client.wait_for_workers(workers, timeout=1800)
    found = {"start": time.time() - float(sys.argv[3])}
    own = [sizes(pid) for pid in client.run(os.getpid).values()]
    found["memory"] = memory()
    found["private"] = statistics.median(one["Private_Clean"] + one["Private_Dirty"] for one in own)
    print("all workers are there:", json.dumps(found), file=sys.stderr, flush=True)
    rows = 2_000_000 // workers
    def table(name):
        values = [dask.delayed(frame)(number, rows, name) for number in range(workers)]
        meta = pandas.DataFrame({"key": [1], name: [1.0]})
        made = dask.dataframe.from_delayed(values, meta=meta).persist()
        wait(made)
        return made
    def frame(number, rows, name):
        values = numpy.random.default_rng(number)
        return pandas.DataFrame({"key": values.integers(0, rows * workers, rows), name: values.random(rows)})
    left, right = table("left"), table("right")
    found["merge"] = timed(lambda: len(left.merge(right, on="key")))
    del left, right
    side = max(1, 8000 // max(1, round(workers ** 0.5)))
    x = dask.array.random.random((8000, 8000), chunks=(side, side)).persist()
    wait(x)
    found["transpose"] = timed(lambda: (x + x.T).sum().compute())
    del x
print(json.dumps(found))
"""

ROWS = (
    ("start", "to all workers, s"),
    ("memory", "memory, MB"),
    ("private", "of a worker alone, MB"),
    ("merge", "merge, s"),
    ("transpose", "x + x.T, s"),
    ("end", "to the end, s"),
)


def ours(file, hosts, gpus):
    """One command for all hosts, as a batch system starts it: what it says of a task is said here."""
    for rank, host in enumerate(hosts):
        flux = {"FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": str(len(hosts)), "FLUX_JOB_ID": "bench"}
        command = [os.environ["CUDA_CLUSTER_BIN"], "up", "--engine", "dask", "--join", "auto"]
        command += ["--scheduler-file", file, "--interface", "far", "--protocol", "tcp"]
        yield host, [*command, "--ready-within", "30m"], flux


def workers_of(command):
    def commands(file, hosts, gpus):
        scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--interface", "far"]
        yield hosts[0], [*scheduler, "--scheduler-file", file], {}
        for host in hosts:
            more = ["--scheduler-file", file, "--interface", "far", "--death-timeout", "1800"]
            yield host, [*command(gpus), *more], {}

    return commands


def dask_cuda(gpus):
    return [sys.executable, "-m", "dask_cuda.cli", "worker"]


def dask_worker(gpus):
    return [sys.executable, "-m", "distributed.cli.dask_worker", "--nworkers", str(gpus), "--nthreads", "1"]


CANDIDATES = {
    "cuda-cluster": ours,
    "dask cuda worker": workers_of(dask_cuda),
    "dask worker": workers_of(dask_worker),
}


@contextlib.contextmanager
def networks(count):
    """Process ids whose networks are hosts, all on one bridge."""
    ip = lambda *words: subprocess.run(["ip", *words], check=True)
    ip("link", "add", "bench", "type", "bridge")
    ip("link", "set", "bench", "up")
    with contextlib.ExitStack() as stack:
        stack.callback(ip, "link", "delete", "bench")
        hosts = []
        for number in range(count):
            shell = "echo; exec cat"
            host = subprocess.Popen(["unshare", "--net", "sh", "-c", shell], stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE)  # fmt: skip
            stack.callback(host.wait)
            stack.callback(host.stdin.close)
            host.stdout.readline()
            inside = ["-n", "-t", str(host.pid)]
            ip("link", "add", f"bench{number}", "type", "veth", "peer", "name", "far", "netns", str(host.pid))
            ip("link", "set", f"bench{number}", "master", "bench", "up")
            for words in (
                ["address", "add", f"{ADDRESS.format(number + 1)}/24", "dev", "far"],
                ["link", "set", "far", "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run(["nsenter", *inside, "ip", *words], check=True)
            hosts.append(host.pid)
        yield hosts


def marked(mark):
    """The processes that bear a mark."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
    return found


def last(log):
    """What was said last, by whomever."""
    log.seek(0)
    return log.read().decode(errors="replace").splitlines()[-20:]


def measure(name, commands, hosts, gpus):
    mark = f"bench-hosts-{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory(prefix="bh", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        environment = {
            **os.environ,
            "BENCH_MARK": mark,
            "XDG_RUNTIME_DIR": folder,
            # A made-up driver has no sensors worth reading.
            "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",
            "PYTHONWARNINGS": "ignore",
        }
        file, log = f"{folder}/scheduler.json", open(f"{folder}/log", "wb+")
        stack.callback(log.close)
        enter = lambda host: ["nsenter", "--net", "--target", str(host)]
        began, started = time.time(), []
        try:
            for host, command, more in commands(file, hosts, gpus):
                options = dict(stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
                started.append(
                    subprocess.Popen([*enter(host), *command], env={**environment, **more}, **options)
                )
            client = [*enter(hosts[0]), sys.executable, "-c", CLIENT]
            client += [str(len(hosts) * gpus), file, str(began)]
            done = subprocess.run(client, env=environment, stdout=subprocess.PIPE, stderr=log,
                                  text=True, timeout=3000)  # fmt: skip
            if done.returncode != 0:
                return {"failed": f"its client ended with {done.returncode}", "log": last(log)}
            found = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return {"failed": "its client did not end within 3000 s", "log": last(log)}
        finally:
            told = time.monotonic()
            for process in started:
                process.terminate()
            ended = lambda: not marked(mark)
            while not ended() and time.monotonic() - told < 120:
                time.sleep(0.05)
            took = time.monotonic() - told
            for pid in marked(mark):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for process in started:
                process.wait()
        return {**found, "end": took}


def main(rounds, count, gpus, candidates):
    found = {name: [] for name in candidates or CANDIDATES}
    with networks(count) as hosts:
        for _ in range(rounds):
            for name, results in found.items():
                if results and "failed" in results[-1]:
                    continue
                results.append(measure(name, CANDIDATES[name], hosts, gpus))
                print(name, json.dumps(results[-1]), file=sys.stderr, flush=True)
    median = {}
    for name, results in found.items():
        if "failed" in results[-1]:
            print(f"{name}: {results[-1]['failed']}")
        else:
            median[name] = {key: statistics.median(one[key] for one in results) for key in results[0]}
    if "cuda-cluster" not in median:
        sys.exit(1)
    print(f"{count} hosts of {gpus} workers, median of {rounds}")
    rivals = [name for name in median if name != "cuda-cluster"]
    print(f"{'':24}{'cuda-cluster':>14}" + "".join(f"{name:>18}{'ratio':>8}" for name in rivals))
    for key, title in ROWS:
        now = median["cuda-cluster"][key]
        others = "".join(f"{median[name][key]:18.2f}{now / median[name][key]:8.2f}" for name in rivals)
        print(f"{title:24}{now:14.2f}{others}")


if __name__ == "__main__":
    # What was started ends with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
