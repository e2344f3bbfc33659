"""What `why` says of the tasks of a Dask cluster: where they run, who waits for them, what holds them back."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import BUILT, eventually
from test_why_libraries import Dask

pytestmark = pytest.mark.usefixtures("nothing_is_left")

CLIENT = """
import os, signal, sys, time
from distributed import Client, Event, wait

def hold(): time.sleep(3600)
def after(n): return n
async def ask(): await Event("never").wait()
def apart(n): return {"workers": [addresses[n % len(addresses)]]}

with Client(sys.argv[1]) as client:
    told = client.scheduler_info(n_workers=-1)["workers"]
    addresses = list(told)
    named = lambda name: next(at for at, one in told.items() if name in (one["name"], one["id"]))
    odd = named("gpu2")
    kept = []
    if sys.argv[2] == "chain":
        kept = [client.submit(hold, workers=[odd], key="hold-it")]
        for n in range(7):
            kept.append(client.submit(after, kept[-1], key=f"after-{n}"))
    elif sys.argv[2] == "unplaced":
        kept = [client.submit(after, n, resources={"MEMORY": 9}, key=f"greedy-{n}") for n in range(3)]
    elif sys.argv[2] == "asynchronous":
        kept = [client.submit(ask, workers=[odd], key="ask-it")]
    elif sys.argv[2] == "fetch":
        owner = named("gpu1")
        kept = [client.submit(bytes, 32 << 20, workers=[owner], key="chunk-7")]
        wait(kept)
        os.kill(client.run(os.getpid, workers=[owner])[owner], signal.SIGSTOP)
        kept.append(client.submit(len, kept[0], workers=[odd], key="use-it"))
    print("submitted", flush=True)
    for n in range(10**6 if sys.argv[2] == "transfers" else 0):
        chunks = [client.submit(bytes, (64 << 20) + at, **apart(n + at), pure=False) for at in range(8)]
        client.gather([client.submit(len, one, **apart(n + at + 1)) for at, one in enumerate(chunks)])
    time.sleep(3600)
"""


@pytest.fixture
def dask(nothing_is_left):
    cluster = Dask()
    yield cluster
    cluster.end()


def why(dask):
    said = subprocess.run([str(BUILT), "why", dask.name, "-o", "json"], capture_output=True, text=True)
    return said.returncode, json.loads(said.stdout)


@pytest.fixture(params=["tcp", "direct"])
def over(request, nothing_is_left):
    cluster = Dask("--protocol", request.param)
    yield cluster
    cluster.end()


def until(dask, program, is_so, seconds=90):
    """What is told of the cluster while a client runs this, once it is so."""
    client = subprocess.Popen([sys.executable, "-c", CLIENT, dask.address, program], stdout=subprocess.PIPE)
    try:
        client.stdout.readline()
        end = time.monotonic() + seconds
        while not is_so(told := why(dask)):
            assert time.monotonic() < end, told[1]["verdict"]
            time.sleep(0.5)
        return told
    finally:
        client.terminate()
        client.communicate(timeout=30)


def test_who_waits_for_what_runs_where_is_told(dask):
    # What has just started may still be at work.
    eventually(lambda: (said := why(dask))[0] == 0 and said[1]["verdict"]["standing"] == "idle", "idle")
    code, told = until(dask, "chain", lambda told: told[1]["verdict"]["standing"] == "stalled")
    verdict = told["verdict"]
    assert (code, verdict["odd"], verdict["cause"]) == (5, ["gpu2"], "sleeps"), verdict
    assert "task hold-it has run on gpu2 for " in verdict["text"]
    assert verdict["text"].endswith(", and 7 others wait for it"), verdict
    assert verdict["groups"][0]["condition"]["place"].endswith(" in hold"), verdict
    assert told["evidence"]["tasks"]["waiting"] == 7

    subprocess.run([str(BUILT), "restart", dask.name, "gpu2"], check=True, capture_output=True)
    code, told = until(dask, "unplaced", lambda told: told[1]["verdict"]["standing"] == "stalled")
    verdict = told["verdict"]
    assert (code, verdict["cause"], verdict["odd"]) == (5, "unplaced", []), verdict
    assert "no worker may run task greedy-0 (for " in verdict["text"], verdict
    assert ", nor 2 others: it needs MEMORY=9, and the most is 0" in verdict["text"], verdict

    # No thread is in it, so nobody knows whether it goes on, once nobody is seen at work.
    def is_so(told):
        verdict = told[1]["verdict"]
        return verdict["standing"] == "cannot_tell" and "ask-it" in verdict["text"]

    code, told = until(dask, "asynchronous", is_so)
    verdict = told["verdict"]
    assert (code, verdict["standing"], verdict["odd"]) == (1, "cannot_tell", ["gpu2"]), verdict


def test_a_bundle_says_the_same_elsewhere(dask, tmp_path):
    saved = tmp_path / "seen.json"

    def is_so(told):
        if told[1]["verdict"]["standing"] != "stalled":
            return False
        said = subprocess.run(
            [str(BUILT), "why", dask.name, "--save", str(saved)], capture_output=True, text=True
        )
        again = subprocess.run([str(BUILT), "why", "--bundle", str(saved)], capture_output=True, text=True)
        assert (said.returncode, said.stdout) == (again.returncode, again.stdout)
        assert "7 others wait for it" in " ".join(said.stdout.split())
        return True

    until(dask, "chain", is_so)


def test_who_fetches_what_from_a_worker_that_is_stopped_is_told(over):
    def is_so(told):
        verdict = told[1]["verdict"]
        return verdict["standing"] == "stalled" and " has been fetching " in verdict["text"]

    try:
        code, told = until(over, "fetch", is_so)
    finally:
        state = json.loads(subprocess.check_output([str(BUILT), "ps", over.name, "-o", "json"]))
        os.kill(next(one["pid"] for one in state["workers"] if one["name"] == "gpu1"), signal.SIGCONT)
    verdict, tasks = told["verdict"], told["evidence"]["tasks"]
    assert (code, verdict["odd"], verdict["cause"]) == (5, ["gpu1"], "stopped"), verdict
    assert "; gpu2 has been fetching chunk-7 (32 MiB) from gpu1 for " in verdict["text"], verdict
    assert verdict["text"].endswith(", for which 1 task waits there"), verdict
    (fetch,) = tasks["fetches"]
    assert (fetch["rank"], fetch["from"], fetch["bytes"] >> 20) == ("gpu2", "gpu1", 32), fetch
    unseen = {one["what"]: one["why"] for one in told["evidence"]["unseen"]}
    assert unseen["what gpu1 fetches"] == "it does not run now, so it was not asked", unseen


def test_workers_that_fetch_all_the_time_are_not_stalled(over):
    looks = []

    def enough(told):
        looks.append(told)
        fetches = [one for _, told in looks for one in told["evidence"]["tasks"].get("fetches", [])]
        return len(looks) >= 8 and fetches

    until(over, "transfers", enough)
    for code, told in looks:
        assert code in (0, 1) and told["verdict"]["standing"] != "stalled", told["verdict"]
        for one in told["evidence"]["tasks"].get("fetches", []):
            assert one["rank"] != one["from"] and one["from"].startswith("gpu"), one
