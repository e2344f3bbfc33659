"""What a user of a running Dask cluster does, and what must come of it: `story.py NAME`.

Run by `tests/dask` against a cluster that cuda-cluster brought up, with the variables of its
`client.env`. Each story prints one JSON object at its end, or ends with a traceback.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, wait
from distributed.diagnostics.plugin import Environ, NannyPlugin, UploadDirectory
from known import workers_of


def workers(client):
    """Worker name to what the scheduler knows about it."""
    known = workers_of(client)
    return {one["name"]: {**one, "address": address} for address, one in known.items()}


def eventually(what, holds, within=30):
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.01)


class Counter:
    """An actor."""

    def __init__(self):
        self.count = 0

    def add(self, number):
        self.count += number
        return self.count


def work(client):
    """Arrays, frames, futures and an actor give the numbers of NumPy and pandas."""
    state = np.random.default_rng(7)
    plain = state.random((1200, 1200))
    x = da.from_array(plain, chunks=(300, 300))
    np.testing.assert_allclose((x + x.T).sum().compute(), (plain + plain.T).sum())
    tall = plain[:, :40]
    _, s, _ = da.linalg.svd(da.from_array(tall, chunks=(300, 40)))
    np.testing.assert_allclose(s.compute(), np.linalg.svd(tall, compute_uv=False))

    left = pd.DataFrame({"key": state.integers(0, 500, 4000), "a": state.random(4000)})
    right = pd.DataFrame({"key": np.arange(500), "b": state.random(500)})
    merged = dd.from_pandas(left, npartitions=8).merge(dd.from_pandas(right, npartitions=4), on="key")
    expected = left.merge(right, on="key").sort_values(["key", "a"]).reset_index(drop=True)
    found = merged.compute().sort_values(["key", "a"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(found, expected, check_dtype=False)
    shuffled = dd.from_pandas(left, npartitions=8).shuffle("key").compute()
    assert shuffled["a"].sum().round(9) == left["a"].sum().round(9)

    assert client.submit(sum, client.map(lambda n: n * n, range(100))).result() == 328350
    counter = client.submit(Counter, actor=True).result()
    for number in range(10):
        counter.add(number).result()
    assert counter.add(0).result() == 45
    return {}


def slow_block(block):
    time.sleep(0.05)
    return block


def crash(client):
    """A worker killed in the middle changes no result, and is back."""
    before = workers(client)
    plain = np.random.default_rng(7).random((1600, 1600))
    x = da.from_array(plain, chunks=(200, 200)).map_blocks(slow_block)
    future = client.compute((x + x.T).sum())
    time.sleep(0.5)
    victim = client.run(os.getpid, workers=[before["gpu1"]["address"]])
    began = time.monotonic()
    os.kill(*victim.values(), signal.SIGKILL)
    np.testing.assert_allclose(future.result(timeout=300), (plain + plain.T).sum())

    def is_back():
        now = workers(client).get("gpu1")
        return now is not None and now["address"] != before["gpu1"]["address"]

    eventually("gpu1 is back", is_back)
    return {"seconds": time.monotonic() - began}


def recovery(client):
    """How long a killed worker is away, as the scheduler sees it; several times."""
    times = []
    for _ in range(5):
        before = workers(client)["gpu0"]["address"]
        victim = client.run(os.getpid, workers=[before])
        began = time.monotonic()
        os.kill(*victim.values(), signal.SIGKILL)

        def is_back():
            return workers(client).get("gpu0", {}).get("address", before) != before

        eventually("gpu0 is back", is_back)
        times.append(time.monotonic() - began)
        time.sleep(0.3)
    return {"seconds": times}


def restart(client):
    """`Client.restart` brings every worker back; a retired one stays away."""
    before = client.run(os.getpid)
    future = client.submit(lambda: 1)
    future.result()
    client.restart(timeout=60)
    after = client.run(os.getpid)
    assert len(after) == len(before) and not set(after.values()) & set(before.values())
    client.retire_workers(names=["gpu2"])
    eventually("gpu2 is away", lambda: "gpu2" not in workers(client))
    time.sleep(1.5)
    assert "gpu2" not in workers(client), "a retired worker must not come back"
    assert client.submit(lambda: 2).result() == 2
    return {"workers": sorted(workers(client))}


def bad_tasks(client):
    """Tasks that end their workers are given up, one by one; everybody else's work goes on."""
    client.set_metadata("story", "kept")
    scheduler = client.run_on_scheduler(os.getpid)
    for number in range(5):
        future = client.submit(os._exit, number % 2, key=f"bad-{number}")
        error = future.exception(timeout=240)
        assert type(error).__name__ == "KilledWorker", error
    assert client.get_metadata("story") == "kept"
    assert client.submit(lambda: 1).result(timeout=120) == 1
    assert client.run_on_scheduler(os.getpid) == scheduler
    eventually("all are back", lambda: len(workers(client)) == 2, within=120)
    return {}


def look_up(name):
    import storypackage

    return os.environ.get(name), storypackage.VALUE


def nanny(client):
    """What a nanny does for its users."""
    everybody = set(workers(client))
    pids = client.run(os.getpid)
    client.register_plugin(Environ({"STORY": "told"}))
    assert set(workers(client)) == everybody
    assert not set(client.run(os.getpid).values()) & set(pids.values()), "restarted"
    with tempfile.TemporaryDirectory() as folder:
        package = os.path.join(folder, "storypackage")
        os.mkdir(package)
        with open(os.path.join(package, "__init__.py"), "w") as file:
            file.write("VALUE = 41\n")
        client.register_plugin(UploadDirectory(package))
    found = client.run(look_up, "STORY")
    assert len(found) == len(everybody) and set(found.values()) == {("told", 41)}, found

    pids = {name: one["address"] for name, one in workers(client).items()}
    assert client.restart_workers(["gpu0"], timeout=60) == {"gpu0": "OK"}
    now = {name: one["address"] for name, one in workers(client).items()}
    assert {name for name in now if now[name] != pids[name]} == {"gpu0"}, (pids, now)
    found = client.run(look_up, "STORY")
    assert len(found) == len(everybody) and set(found.values()) == {("told", 41)}, found
    found = client.run(os.getpid, nanny=True)
    assert found == client.run(os.getpid) and len(found) == len(everybody), found

    class Wrong(NannyPlugin):
        def setup(self, nanny):
            raise ValueError("as asked for")

    try:
        client.register_plugin(Wrong())
        raise AssertionError("its error is told")
    except ValueError as error:
        assert str(error) == "as asked for"
    return {}


def unstick(client):
    """A worker that answers nobody is restarted all the same."""
    hang(client)
    before = workers(client)["gpu0"]["address"]
    assert client.restart_workers(["gpu0"], timeout=120) == {"gpu0": "OK"}
    assert workers(client)["gpu0"]["address"] != before
    assert client.submit(lambda: 1, workers=["gpu0"]).result(timeout=60) == 1
    return {}


def joined_nanny(client):
    """Workers at a scheduler elsewhere honour plugins and restarts, too."""
    before = client.run(os.getpid)
    client.register_plugin(Environ({"STORY": "told"}))
    told = lambda: list(client.run(os.getenv, "STORY").values()) == ["told"] * len(before)
    eventually("all are back and told", told, within=60)
    client.restart(timeout=60)
    assert told()
    return {}


def adapt(client):
    """Workers come with the work and go without it; what they hold is not lost."""
    everybody, least = 3, 1
    eventually("idle workers are gone", lambda: len(workers(client)) == least, within=120)
    futures = client.map(busy, range(60))
    eventually("all workers are back", lambda: len(workers(client)) == everybody, within=120)
    assert sum(client.gather(futures)) == 1770
    # Scattered data cannot be made again: it is there, or it is lost.
    for name, one in workers(client).items():
        client.publish_dataset(client.scatter(name, workers=[one["address"]]), name=name)
    del futures
    eventually("idle workers are gone again", lambda: len(workers(client)) == least, within=120)
    kept = {name: client.get_dataset(name).result() for name in client.list_datasets()}
    assert len(kept) == everybody and all(name == value for name, value in kept.items()), kept
    return {"workers": sorted(workers(client))}


def hoard(client):
    """A task that takes more memory than there is loses its worker, which comes back."""
    before = workers(client)["gpu0"]["address"]
    future = client.submit(fill_memory, key="hoard")
    eventually(
        "gpu0 is another process",
        lambda: workers(client).get("gpu0", {}).get("address", before) != before,
        within=120,
    )
    future.cancel(force=True)
    return {}


def fill_memory():
    taken = []
    for _ in range(40):
        taken.append(bytearray(b"x" * 50_000_000))
        time.sleep(0.05)


def busy(number):
    time.sleep(0.5)
    return number


def leave_data(client):
    """Leaves on each worker what only it has."""
    for name, one in workers(client).items():
        future = client.scatter("from " + name, workers=[one["address"]], hash=False)
        client.publish_dataset(future, name=name)
    return {}


def find_data(client):
    """Finds what was left, once there are no workers but the first."""
    eventually("one worker is left", lambda: sorted(workers(client)) == ["gpu0"], within=60)
    return {name: client.get_dataset(name).result() for name in client.list_datasets()}


def shutdown(client):
    """`Client.shutdown` ends the cluster."""
    client.shutdown()
    return {}


def inside(dask_worker):
    """What a worker finds itself to be."""
    worker = dask_worker
    threads = os.listdir("/proc/self/task")
    return {
        "name": worker.name,
        "pid": os.getpid(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("UCX", "CUDA", "OMP"))},
        "affinities": [sorted(os.sched_getaffinity(int(thread))) for thread in threads],
        "threads": worker.state.nthreads,
        "memory_limit": worker.memory_manager.memory_limit,
        "data": type(worker.data).__name__,
        "device_memory_limit": getattr(getattr(worker.data, "device_buffer", None), "n", None),
        "resources": dict(worker.state.total_resources),
        "local_directory": worker.local_directory,
        "lifetime": worker.lifetime,
        "death_timeout": worker.death_timeout,
        "class": type(worker).__module__ + "." + type(worker).__name__,
        "address": worker.address,
        "dashboard_prefix": worker._http_prefix,
        "imported": [name for name in ("colorsys", "turtle") if name in sys.modules],
        "preloaded": os.environ.get("STORY_PRELOADED"),
        "draw": float(np.random.rand()),
        "parent": os.getppid(),
    }


def look(client):
    """What each worker finds itself to be, and what the scheduler says."""
    import dask

    found = client.run(inside)
    config = client.run(lambda: dask.config.get("distributed.worker.memory.target"))
    lanes = client.run(lambda: "ucxx" in sys.modules)
    services = {name: one["services"] for name, one in workers(client).items()}
    return {
        "workers": {one["name"]: one for one in found.values()},
        "target": sorted(config.values()),
        "ucxx": sorted(lanes.values()),
        "services": services,
        "scheduler": client.scheduler.address,
    }


def hold_the_lock(seconds):
    """Sleeps in C and never lets go of the interpreter's lock."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(seconds * 1_000_000))


def hang(client):
    """Leaves a worker in C code that holds the interpreter's lock."""
    client.submit(hold_the_lock, 60, workers=["gpu0"])
    time.sleep(0.5)
    return {"pids": []}


def transfer(client):
    """Moves an array of 256 MB from worker to worker, several times; says how fast."""
    one, other = workers(client)["gpu0"]["address"], workers(client)["gpu1"]["address"]
    speeds = []
    for seed in range(6):
        source = client.submit(np.full, 32_000_000, float(seed), workers=[one], key=f"s{seed}")
        wait(source)
        began = time.monotonic()
        moved = client.submit(lambda a: float(a[-1]), source, workers=[other], key=f"m{seed}")
        assert moved.result() == float(seed)
        speeds.append(0.256 / (time.monotonic() - began))
        del source, moved
    return {"gb_per_s": speeds}


def spread(client):
    """Which workers there are, and on whose scheduler."""
    assert client.submit(lambda: 1).result() == 1
    return {"workers": sorted(workers(client))}


def ports(client):
    """Where everything listens."""
    health = []
    for one in workers(client).values():
        host = one["host"]
        # Below the prefix that the cluster was brought up with.
        url = f"http://{host}:{one['services']['dashboard']}/front/health"
        health.append(urllib.request.urlopen(url).read().decode())
    return {
        "health": health,
        "workers": {name: one["address"] for name, one in workers(client).items()},
        "scheduler": client.scheduler.address,
    }


def pages(client):
    """The pages of the dashboards of the scheduler and of a worker, and what comes of opening them."""
    found = {}

    def look(base, names):
        for page in names:
            try:
                found[base + page] = urllib.request.urlopen(base + page).status
            except urllib.error.HTTPError as error:
                found[base + page] = error.code

    bokeh = client.run_on_scheduler(lambda: "bokeh" in sys.modules)
    for one in workers(client).values():
        prefix = client.run(lambda dask_worker: dask_worker._http_prefix, workers=[one["address"]])
        prefix = (prefix[one["address"]].strip("/") + "/").lstrip("/")
        base = f"http://{one['host']}:{one['services']['dashboard']}/{prefix}"
        look(base, ["status", "system", "profile", "status"])
        base = client.dashboard_link.removesuffix("status") + prefix
        # Dask leads from a prefix alone to nowhere.
        look(base, [*([] if prefix else [""]), "health", "individual-plots.json", "status", "nowhere"])
    return {"pages": found, "bokeh before": bokeh, "link": base + "status"}


def four(client):
    """Four workers, from wherever."""
    client.wait_for_workers(4, timeout=120)
    return spread(client)


def main(name, *arguments):
    with Client(scheduler_file=os.environ.get("DASK_SCHEDULER_FILE"), timeout=30) as client:
        print(json.dumps(globals()[name](client, *arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
