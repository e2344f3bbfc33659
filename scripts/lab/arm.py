"""Checks on 64-bit Arm: a real kernel on an emulated processor, with pages of a size that the command
line names. `scripts/arm-check.sh` boots the machine; what is under `/lab` comes from there.

    arm.py PAGES TESTS...    TESTS are programs of `cargo test` under /lab/tests

GPUs are simulated. Nothing is judged by its duration.
"""

import os
import pathlib
import re
import resource
import subprocess
import sys

import guest
from guest import Table, containing, lanes, needs, processes, program, sh, state, up

table = Table()
check = table.check

#: Two workers: each takes seconds to start in emulation.
TWO = ("--topology", "rtx-4090-2", "--simulate", "--display-gpus", "use")
#: `pip install --target` has put the wheel, Dask and libucx there.
SITE = pathlib.Path("/lab/site")

#: Sums an array that one worker has, on the other one, and asks how it got there.
DASK = """
import numpy
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client

def bytes_of(array):
    from cuda_cluster import comm
    return int(array.sum(dtype="u8")), comm.received()

if __name__ == "__main__":
    with LocalCUDACluster(topology="rtx-4090-2", simulate=True, display_gpus="use", protocol="direct",
                          ready_within="1500s") as cluster, Client(cluster, timeout="1500s") as client:
        here, there = client.scheduler_info(n_workers=-1)["workers"]
        array = client.submit(numpy.ones, 1 << 22, dtype="u1", workers=[here])
        print(here.split(":")[0], *client.submit(bytes_of, array, workers=[there]).result())
"""


def machine_itself():
    pages = int(sys.argv[1])
    check(f"the kernel's pages have {pages} bytes", pages, resource.getpagesize)
    check("the processor is Arm's", "aarch64", os.uname().machine)
    check("it says its version", containing("cuda-cluster 0"), lambda: program("--version"))
    nodes = [(0, "0-1"), (1, "2-3")]
    seen = needs(program("topo", "-o", "json")).json()["numa"]
    check("it sees 2 NUMA nodes with 2 CPUs each", nodes, [(node["id"], node["cpus"]) for node in seen])
    check("it plans for a machine with Arm processors", 0,
          lambda: program("plan", "--topology", "gb300-nvl72-tray").code)


def programs():
    ranks = containing("rank 0", "rank 1")
    check("it runs a program for every GPU", ranks,
          lambda: needs(program("run", *TWO, "--", "sh", "-c", "echo rank $RANK")))

    spec = pathlib.Path("/tmp/sleep.yaml")
    spec.write_text("version: 1\nengine: command\ncommand: {argv: [sleep, '1000']}\n")
    with up("-f", spec, *TWO):
        check("a cluster of programs is up", 2, lambda: len(sleeping()))
    check("nothing of it is left", [], lambda: sleeping() + sorted(processes()))


def sleeping():
    return subprocess.run(["pgrep", "-x", "sleep"], capture_output=True, text=True).stdout.split()


def native():
    for whose, flags in {
        "Debian": ("--ucx", "system"),
        "NVIDIA": ("--ucx", str(SITE / "libucx/lib/libucp.so.0")),
    }.items():
        what = f"the native engine over {whose}'s UCX"
        with up(*TWO, *flags):
            check(f"{what}: every pair has a lane through shared memory", {True},
                  lambda: {"posix/memory" in each for each in lanes(state()).values()})
            verified = program("verify", "lab", "--budget", "60s", "-o", "json")
            check(f"{what}: memory arrives, both ways", 2, lambda: len(verified.json()["pairs"]))
            check(f"{what}: objects of one worker are read by the other", 0,
                  lambda: needs(program("bench", "transpose", "lab", "--runs", "1")).code)


def dask():
    def enough(seen):
        """the sum of the array, whose bytes were read where the peer has them"""
        return bool(re.search(r"^direct 4194304 .*'(copied|mapped)': 4\d{6}", seen))

    environment = {**os.environ, "PYTHONPATH": str(SITE)}
    script = pathlib.Path("/tmp/sums.py")
    script.write_text(DASK)
    # pip has left that out; every process would do it for itself, for minutes on an emulated processor.
    if not (SITE / "distributed/__pycache__").exists():
        sh("python3", "-m", "compileall", "-q", "-j", "4", "-x", "/tests?/", SITE, within=1500)
    check("Dask over direct://: an array goes from a worker to the other", enough,
          lambda: sh("python3", script, env=environment, within=1700).strip())


def laws():
    for path in map(pathlib.Path("/lab/tests").joinpath, sys.argv[2:]):
        done = subprocess.run([path, "--test-threads", "4"], capture_output=True, text=True)
        # What failed, with its words.
        print("\n".join(done.stdout.partition("failures:\n")[2].splitlines()[:60]), done.stderr[-2000:])
        said = re.search(r"test result: (.*); finished", done.stdout)
        check(f"the tests of {path.name}", containing("ok. ", " 0 failed; 0 ignored"),
              lambda said=said: said.group(1) if said else "no end")


if __name__ == "__main__":
    for name in ("CUDA_CLUSTER_NVML", "CUDA_CLUSTER_FAKE_NVML", "LD_LIBRARY_PATH"):
        guest.ENVIRONMENT.pop(name)
    os.makedirs("/run/lab", mode=0o700)
    table.run([machine_itself, programs, native, dask, laws], wanted=())
