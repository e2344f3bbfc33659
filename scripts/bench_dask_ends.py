"""Measures how long a Python with a cluster takes to end: `bench_dask_ends.py ROUNDS`.

The same two workers, with `distributed.LocalCluster` and with `LocalCUDACluster`, in turns. A task
sleeps, and then the Python ends: by Ctrl-C, by SIGTERM, at the end of its script, by `close()`. Timed is
until it has ended and none of its processes is left.
"""

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time


def sleep(sign):
    # Not an Event of Dask's: for that, the worker would need a client.
    open(sign, "w").close()
    time.sleep(600)


def main():
    from distributed import Client
    {start}
    client, sign = Client(cluster), __file__ + ".began"
    future = client.submit(sleep, sign)
    while not os.path.exists(sign):
        time.sleep(0.01)
    print("began", flush=True)
    sys.stdin.readline()
    {end}


if __name__ == "__main__":
    main()
"""

STARTS = {
    "LocalCluster": """
    from distributed import LocalCluster
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)""",
    "cuda-cluster": """
    from cuda_cluster.dask import LocalCUDACluster
    cluster = LocalCUDACluster(n_workers=2, dashboard_address=None, protocol="tcp",
                               topology="dgx-a100", simulate=True)""",
}

#: How it ends: what its script does when it may go on, and the signal instead of that.
WAYS = {
    "Ctrl-C": ("pass", signal.SIGINT),
    "SIGTERM": ("pass", signal.SIGTERM),
    "end of the script": ("pass", None),
    "close()": ("client.close(); cluster.close()", None),
}

#: Seconds after which an end is not waited for.
PATIENCE = 120


def processes(mark):
    """The processes of a cluster, by what stands in their environment."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{entry}/environ").read_bytes():
                # Not those that have ended, and that nobody has asked for yet.
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2][0]
                found += [int(entry)] if state != "Z" else []
        except OSError:
            continue
    return found


def measure(name, way, folder):
    end, number = WAYS[way]
    path = os.path.join(folder, "script.py")
    with open(path, "w") as file:
        file.write(SCRIPT.format(start=STARTS[name], end=end))
    environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
    with open(os.path.join(folder, "errors"), "w+") as errors:
        program = subprocess.Popen(
            [sys.executable, path], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        if not select.select([program.stdout], [], [], PATIENCE)[0] or program.stdout.readline() != "began\n":
            program.kill()
            errors.seek(0)
            sys.exit(f"{name} did not start: {errors.read()[-2000:]}")
    began = time.monotonic()
    if number is None:
        program.stdin.write("\n")
        program.stdin.flush()
    elif number == signal.SIGINT:
        # As a terminal sends it: to all in its foreground.
        os.killpg(program.pid, number)
    else:
        program.send_signal(number)
    program.wait(PATIENCE)
    ended = time.monotonic() - began
    while processes(folder.encode()):
        if time.monotonic() - began > PATIENCE:
            sys.exit(f"{name}, {way}: processes are left: {processes(folder.encode())}")
        time.sleep(0.01)
    return {"ended": ended, "nothing left": time.monotonic() - began}


def main(rounds):
    found = {}
    for _ in range(rounds):
        for way in WAYS:
            for name in STARTS:
                with tempfile.TemporaryDirectory(prefix="bde", dir="/tmp", ignore_cleanup_errors=True) as folder:
                    result = measure(name, way, folder)
                print(way, name, json.dumps(result), file=sys.stderr)
                found.setdefault((way, name), []).append(result)
    print(f"2 workers, a task that sleeps, median of {rounds}; s")
    print(f"{'':36}{'LocalCluster':>14}{'cuda-cluster':>14}{'ratio':>8}")
    for way in WAYS:
        for what in ("ended", "nothing left"):
            before, now = (statistics.median(one[what] for one in found[way, name]) for name in STARTS)
            print(f"{way + ', ' + what:36}{before:14.2f}{now:14.2f}{now / before:8.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
