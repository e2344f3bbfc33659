"""Measures transfers from worker to worker: `bench_dask_transfer.py CUDA_CLUSTER ROUNDS`.

Two workers, one array of 256 MB after the other, each made on the one and fetched by the other; the
clock runs from the submission of the task that needs it until its result is back. The first two are
warm-up: their pages are new to the machine. The lanes are read in the worker that fetches, from
UCX's own description of its connections to the other.
"""

import ctypes
import json
import re
import shlex
import statistics
import subprocess
import sys
import time

import bench_dask_start as start

start.WORKERS = 2
WARM_UP, TRANSFERS = 2, 7


def lanes(peer, dask_worker):
    """The lanes of this worker's connections to a peer, or their scheme."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    pool, found = dask_worker.rpc, []
    for comm in [*pool.available.get(peer, ()), *pool.occupied.get(peer, ())]:
        endpoint = getattr(comm, "_ep_handle", None)
        if endpoint is None:
            return ["tcp"]
        text, length = ctypes.c_void_p(), ctypes.c_size_t()
        stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(length)))
        ctypes.CDLL("libucp.so.0").ucp_ep_print_info(ctypes.c_void_p(endpoint), stream)
        libc.fclose(stream)
        description = ctypes.string_at(text, length.value).decode()
        found += re.findall(r"lane\[\d+\]:\s+\d+:(\S+?)(?:\.\d+)?\s", description)
    return sorted(set(found))


def transfer(address):
    """A client's part: GB/s of each transfer, and the lanes."""
    import numpy
    from distributed import Client, wait

    with Client(address, timeout=60) as client:
        while len(known := client.scheduler_info(n_workers=-1)["workers"]) < start.WORKERS:
            time.sleep(0.05)
        one, other = sorted(known)
        speeds = []
        for seed in range(WARM_UP + TRANSFERS):
            source = client.submit(numpy.full, 32_000_000, float(seed), workers=[one], key=f"s{seed}")
            wait(source)
            began = time.monotonic()
            moved = client.submit(lambda a: float(a[-1]), source, workers=[other], key=f"m{seed}")
            assert moved.result() == float(seed)
            speeds.append(0.256 / (time.monotonic() - began))
            del source, moved
        used = client.run(lanes, one, workers=[other])[other]
    print(json.dumps([speeds[WARM_UP:], used]))


class Plain(start.Theirs):
    """distributed's own cluster, with no UCX variable set by anybody."""

    def __init__(self):
        super().__init__("distributed", "LocalCluster", "ucxx")
        self.name = "LocalCluster over ucxx"
        del self.environment["UCX_TCP_CM_REUSEADDR"]

    def client(self):
        return self.environment


class Planned(start.Ours):
    """cuda-cluster's workers and environment; a simulated machine's CPUs would be few and shared."""

    extra = ("--cpus", "none")

    def __init__(self, binary, protocol):
        super().__init__(binary, protocol, "fork")
        self.name = f"cuda-cluster over {protocol}"

    def client(self):
        """The environment of a shell that has read `client.env`."""
        file = self.folder / "cuda-cluster/b/client.env"
        words = (word for word in shlex.split(file.read_text()) if "=" in word)
        return {**self.environment, **dict(word.split("=", 1) for word in words)}


def measure(candidate):
    try:
        candidate.start()
        deadline = time.monotonic() + 120
        while True:
            try:
                address = candidate.address()
                environment = candidate.client()
                break
            except (OSError, ValueError, KeyError):
                if time.monotonic() > deadline:
                    raise TimeoutError((candidate.folder / "output").read_text()[-2000:]) from None
                time.sleep(0.05)
        command = [start.PYTHON, __file__, "--client", address]
        output = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=600
        )
        speeds, used = json.loads(output.stdout.splitlines()[-1])
        return statistics.median(speeds), used
    finally:
        candidate.end()


def main(binary, rounds):
    makers = [lambda: Planned(binary, "ucxx"), Plain, lambda: Planned(binary, "tcp")]
    results = {}
    for _ in range(int(rounds)):
        for make in makers:
            candidate = make()
            speed, used = measure(candidate)
            print(f"{candidate.name:28}{speed:8.2f} GB/s  {' '.join(used)}", flush=True)
            results.setdefault(candidate.name, []).append(speed)
    print(f"256 MB from worker to worker, {rounds} rounds in turn, medians of medians")
    for name, speeds in results.items():
        print(f"{name:28}{statistics.median(speeds):8.2f} GB/s")
    ours, plain, tcp = results.values()
    for name, others in (("LocalCluster over ucxx", plain), ("TCP", tcp)):
        ratio = statistics.median(a / b for a, b in zip(ours, others))
        print(f"ours over ucxx / {name}: {ratio:.2f}")


if __name__ == "__main__":
    transfer(sys.argv[2]) if sys.argv[1] == "--client" else main(*sys.argv[1:])
