"""Measures how Dask clusters start: `bench_dask_start.py CUDA_CLUSTER ROUNDS PROTOCOL`.

Every candidate is a command of its own; the clock runs from the moment it is started until the
scheduler knows eight workers, as a client connected from outside sees it. Memory is the sum of the
proportional set sizes (PSS) of all processes that carry the candidate's mark in their environment.
"""

import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKERS = 8
PYTHON = sys.executable

# Starts a cluster as a script does, and tells where its scheduler is.
SCRIPT = """
import os, sys, time
from {module} import {cluster}
if __name__ == "__main__":
    cluster = {cluster}(n_workers={workers}, threads_per_worker=1, protocol=sys.argv[1],
                        memory_limit="1GiB", dashboard_address="127.0.0.1:0")
    with open(sys.argv[2] + ".new", "w") as file:
        file.write(cluster.scheduler_address)
    os.rename(sys.argv[2] + ".new", sys.argv[2])
    time.sleep(600)
"""


class Candidate:
    """One way to start a cluster."""

    def __init__(self, name, protocol):
        self.name, self.protocol = name, protocol
        self.mark = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="bds"))
        self.environment = {
            **os.environ,
            "BENCH_MARK": self.mark,
            "XDG_RUNTIME_DIR": str(self.folder),
            "UCX_TCP_CM_REUSEADDR": "y",
            "UCX_WARN_UNUSED_ENV_VARS": "n",
        }
        if "CUDA_CLUSTER_FAKE_NVML" in os.environ:
            # A made-up driver has no sensors, which distributed would read.
            self.environment["DASK_DISTRIBUTED__DIAGNOSTICS__NVML"] = "False"
        self.processes = []

    def run(self, *command):
        output = open(self.folder / "output", "a")
        self.processes.append(
            subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
        )

    def pids(self):
        """Of all processes that were started with the mark."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if f"BENCH_MARK={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(int(pid))
            except OSError:
                continue
        return found

    def memory(self):
        """In MB, shared pages divided among their sharers."""
        total = 0
        for pid in self.pids():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        return total / 1000

    def last_words(self):
        lines = (self.folder / "output").read_text().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it says nothing")

    def end(self):
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + 15
        while self.pids() and time.monotonic() < deadline:
            for process in self.processes:
                process.poll()
            time.sleep(0.05)
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def sees_gpus():
    """Whether the driver, or a made-up one, shows any."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount() > 0
    except pynvml.NVMLError:
        return False


class Ours(Candidate):
    extra = ()

    def __init__(self, binary, protocol, method):
        super().__init__(f"cuda-cluster ({method})", protocol)
        self.binary, self.method = binary, method

    def start(self):
        flags = ["--engine", "dask", "--python", PYTHON, "--protocol", self.protocol]
        machine = [] if sees_gpus() else ["--topology", "dgx-a100", "--simulate"]
        # A made-up driver has no CUDA: dask-cuda logs that and goes on, ours is told not to try.
        spec = self.folder / "spec.yaml"
        spec.write_text("version: 1\ndask: {config: {distributed-ucxx.create-cuda-context: 'false'}}")
        self.run(
            self.binary, "up", "-f", str(spec), "--name", "b", "--start-method", self.method,
            "--n-workers", str(WORKERS), "--memory-limit", "1GiB", *machine, *flags,
            *self.extra,
        )

    def address(self):
        path = self.folder / "cuda-cluster/b/scheduler.json"
        return json.loads(path.read_text())["address"]


class Theirs(Candidate):
    def __init__(self, module, cluster, protocol):
        super().__init__(cluster, protocol)
        self.script = SCRIPT.format(module=module, cluster=cluster, workers=WORKERS)

    def start(self):
        path = self.folder / "cluster.py"
        path.write_text(self.script)
        self.run(PYTHON, str(path), self.protocol, str(self.folder / "address"))

    def address(self):
        return (self.folder / "address").read_text()


class Shells(Candidate):
    """`dask scheduler` and `dask cuda worker`, two shells."""

    def __init__(self, protocol):
        super().__init__("dask scheduler + dask cuda worker", protocol)

    def start(self):
        file = str(self.folder / "scheduler.json")
        dask = str(Path(PYTHON).parent / "dask")
        self.run(
            dask, "scheduler", "--protocol", self.protocol, "--host", "127.0.0.1", "--port", "0",
            "--scheduler-file", file, "--dashboard-address", "127.0.0.1:0",
        )
        self.run(dask, "cuda", "worker", "--scheduler-file", file, "--memory-limit", "1GiB")

    def address(self):
        return json.loads((self.folder / "scheduler.json").read_text())["address"]


WATCH = """
import json, os, signal, sys, time
from distributed import Client
address = sys.argv[1]
say = lambda found: print("found " + json.dumps(found), flush=True)
say("imported")
client = Client(sys.stdin.readline().strip(), timeout=60)
names = lambda: {v["name"]: k for k, v in client.scheduler_info(n_workers=-1)["workers"].items()}
while len(names()) < int(address):
    time.sleep(0.005)
say(time.time())
sys.stdin.readline()
back = []
for turn in range(3):
    # Each time another one: what dies twice in a row is a crash loop, and waits.
    before = names()
    name = sorted(before, key=str)[turn]
    pid = list(client.run(os.getpid, workers=[before[name]]).values())[0]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    # By its address: `dask cuda worker` gives the next one another name.
    while before[name] in (now := names()).values() or len(now) < int(address):
        time.sleep(0.002)
        if time.monotonic() - began > 30: break
    back.append(time.monotonic() - began)
    time.sleep(0.5)
say(back)
"""


def hear(watch):
    """What the watching client found next; UCX writes its own lines between."""
    for line in watch.stdout:
        if line.startswith("found "):
            return json.loads(line.removeprefix("found "))
    raise EOFError("the watching client has ended")


def measure(candidate):
    """Seconds to eight workers, MB of memory, seconds until a killed worker is back."""
    watch = subprocess.Popen(
        [PYTHON, "-c", WATCH, str(WORKERS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**candidate.environment, "BENCH_MARK": "watch"}, stderr=subprocess.DEVNULL,
    )
    try:
        hear(watch)
        began = time.time()
        candidate.start()
        while True:
            try:
                address = candidate.address()
                break
            except (OSError, ValueError, KeyError):
                time.sleep(0.005)
                ended = any(process.poll() for process in candidate.processes)
                if ended or time.time() - began > 120:
                    raise TimeoutError(candidate.last_words()) from None
        print(address, file=watch.stdin, flush=True)
        ready = hear(watch) - began
        memory = candidate.memory()
        print(file=watch.stdin, flush=True)
        back = hear(watch)
        return ready, memory, statistics.median(back)
    finally:
        watch.kill()
        watch.wait()
        candidate.end()


def main(binary, rounds, protocol):
    makers = [lambda: Ours(binary, protocol, "fork"), lambda: Ours(binary, protocol, "spawn")]
    if sees_gpus():
        makers.append(lambda: Theirs("dask_cuda", "LocalCUDACluster", protocol))
        makers.append(lambda: Shells(protocol))
    else:
        makers.append(lambda: Theirs("distributed", "LocalCluster", protocol))
    results = {}
    for _ in range(int(rounds)):
        for make in makers:
            candidate = make()
            try:
                found = measure(candidate)
            except (TimeoutError, EOFError) as failure:
                # It stands in no summary: every figure there has all rounds.
                print(f"{candidate.name:36} failed: {failure}", flush=True)
                continue
            print("{:36}{:9.2f} s {:8.0f} MB {:8.2f} s".format(candidate.name, *found), flush=True)
            results.setdefault(candidate.name, []).append(found)
    whole = {name: found for name, found in results.items() if len(found) == int(rounds)}
    summarize({name: list(zip(*found)) for name, found in whole.items()}, rounds, protocol)


def summarize(results, rounds, protocol):
    """Medians, and ours as a share of each of theirs, round by round."""
    print(f"{WORKERS} workers over {protocol}, {rounds} rounds in turn, medians")
    print(f"{'':36}{'ready s':>9}{'PSS MB':>9}{'back s':>9}")
    for name, columns in results.items():
        print(f"{name:36}" + "".join(f"{statistics.median(c):9.2f}" for c in columns))
    ours = [name for name in results if name.startswith("cuda-cluster")]
    for name, theirs in ((n, c) for n, c in results.items() if n not in ours):
        for own in ours:
            shares = [
                statistics.median(a / b for a, b in zip(mine, other))
                for mine, other in zip(results[own], theirs)
            ]
            print(f"{own} / {name}: " + "  ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main(*sys.argv[1:])
