"""native://, random faults under work, from a seed: whatever is killed or stopped, results are right, no
worker is lost that was not killed, and nothing is left.

CHAOS_SEED determines the faults, CHAOS_FAULTS how many there are; scripts/chaos.sh runs hundreds.
"""

import collections
import os
import random
import signal
import time

import numpy as np
import psutil
from distributed import Client, LocalCluster, wait

from conftest import eventually
from test_comm import descriptors

SEED = int(os.environ.get("CHAOS_SEED", "1"))
FAULTS = int(os.environ.get("CHAOS_FAULTS", "3"))
WORKERS = 3
#: An array's length in bytes: a frame of a socket, one that is copied, one that may be mapped.
SIZES = [1_000, 300_000, 8_000_000]


def array(seed, size):
    return np.random.default_rng(seed).integers(0, 255, size, dtype="u1")


def processes():
    """Those that this one has started, but for one of Python's own."""
    children = psutil.Process().children(recursive=True)
    return {one for one in children if not any("resource_tracker" in word for word in one.cmdline())}


def pids(client):
    return client.run(os.getpid)


def shifted(left, right):
    """Of both arrays each byte, so that one that is wrong shows."""
    return np.add(left, right[::-1])


def work(client, chance):
    """A graph whose arrays move between workers, and what its results must be."""
    size, base = chance.choice(SIZES), chance.randrange(1 << 30)
    made = [client.submit(array, base + at, size, pure=False, retries=20) for at in range(6)]
    results = [client.submit(shifted, left, right, pure=False, retries=20)
               for left, right in zip(made, made[3:] + made[:3], strict=True)]
    own = [array(base + at, size) for at in range(6)]
    expected = [shifted(own[at], own[(at + 3) % 6]) for at in range(6)]
    return results, expected


def strike(fault, victims, chance):
    time.sleep(chance.random() / 5)
    for pid in victims:
        os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "stop":
        time.sleep(chance.random())
        for pid in victims:
            os.kill(pid, signal.SIGCONT)


def test_results_are_right_whatever_is_killed_or_stopped(tmp_path):
    chance = random.Random(SEED)
    struck = collections.Counter()
    before = descriptors(), processes()
    with (
        LocalCluster(
            protocol="native", n_workers=WORKERS, threads_per_worker=1, memory_limit="1 GB",
            dashboard_address=None, local_directory=str(tmp_path),
        ) as cluster,
        Client(cluster) as client,
    ):
        client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 100))
        for turn in range(FAULTS):
            there = sorted(pids(client).values())
            fault = chance.choice(["nothing", "kill", "stop", "stop"])
            victims = chance.sample(there, chance.randrange(1, WORKERS)) if fault != "nothing" else []
            results, expected = work(client, chance)
            strike(fault, victims, chance)
            wait(results, timeout=300)
            got = client.gather(results)
            why = f"seed {SEED}, turn {turn}: {fault}"
            assert all(map(np.array_equal, got, expected)), why
            del results, got
            client.wait_for_workers(WORKERS, timeout=300)
            killed = set(victims) if fault == "kill" else set()
            assert set(there) - set(pids(client).values()) == killed, why
            struck[fault] += 1
    print(f"native: seed {SEED}: {FAULTS} faults: {dict(struck)}")
    eventually(lambda: processes() <= before[1], f"no process is left: {processes()}")
    assert descriptors() <= before[0] + 10, (before[0], descriptors())
