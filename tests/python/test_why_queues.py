"""What `why` says of the tasks of a Dask cluster: where they run, who waits for them, what holds them back."""

import json
import subprocess
import sys
import time

import pytest
from conftest import BUILT
from test_why_libraries import Dask

pytestmark = pytest.mark.usefixtures("nothing_is_left")

CLIENT = """
import sys, time
from distributed import Client, Event

def hold(): time.sleep(3600)
def after(n): return n
async def ask(): await Event("never").wait()

with Client(sys.argv[1]) as client:
    told = client.scheduler_info(n_workers=-1)["workers"]
    odd = next(at for at, one in told.items() if "gpu2" in (one["name"], one["id"]))
    kept = []
    if sys.argv[2] == "chain":
        kept = [client.submit(hold, workers=[odd], key="hold-it")]
        for n in range(7):
            kept.append(client.submit(after, kept[-1], key=f"after-{n}"))
    elif sys.argv[2] == "unplaced":
        kept = [client.submit(after, n, resources={"MEMORY": 9}, key=f"greedy-{n}") for n in range(3)]
    elif sys.argv[2] == "asynchronous":
        kept = [client.submit(ask, workers=[odd], key="ask-it")]
    print("submitted", flush=True)
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
    code, told = why(dask)
    assert (code, told["verdict"]["standing"]) == (0, "idle"), told["verdict"]
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

    # No thread is in it, so nobody knows whether it goes on.
    code, told = until(dask, "asynchronous", lambda told: "ask-it" in told[1]["verdict"]["text"])
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
