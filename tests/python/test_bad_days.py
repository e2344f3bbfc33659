"""Bad days of three hosts, in short: one round for each kind of fault, and what each must look like from the
host with the scheduler. `scripts/hosts-lab.sh` has long ones."""

import os
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from bad_days import Day
from conftest import RUNTIME, eventually
from lab_cluster import Cluster
from lab_hosts import lab, lab_obstacle
from lab_work import piece

OBSTACLE = lab_obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))

#: The scheduler's host loses everything in the long form alone: all others have to give it up.
ROUNDS = [
    [("power off", 1), ("slow line", 0)],
    [("frozen", 2), ("SIGTERM", 1)],
    [("no network", 2), ("unknown names", 1)],
    [("scheduler killed", 0), ("full disk", 2)],
]

SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.fixture(scope="module")
def cluster():
    """One on three hosts; at the end nothing of it may be left on them."""
    with lab(3, SEED, Path(RUNTIME)) as made:
        cluster = Cluster(made)
        cluster.bring_back(False, 300)
        yield cluster
        assert not cluster.down()


def seen(cluster, host):
    """State and reason of the workers of a host that has joined."""
    joined = cluster.state()["joined"]
    return {(one["state"], one.get("reason")) for one in joined if one["host"] == host.name}


def addresses(client, host):
    workers = client.sync(client.scheduler.identity)["workers"]
    return [address for address, one in workers.items() if one["host"] == host.address]


def test_results_are_right_and_ends_have_causes_whatever_happens_to_hosts(cluster):
    day = Day(cluster, SEED)
    for number, asked in enumerate(ROUNDS):
        day.round(number, asked)
    print(day.diary)
    assert day.diary.is_good, day.diary


def test_a_frozen_host_is_given_up_and_comes_back_and_what_it_held_is_said_to_be_lost(cluster):
    host = cluster.lab.hosts[1]
    with cluster.client() as client:
        [held] = client.scatter([[1, 2, 3]], workers=addresses(client, host)[:1], hash=False)
        made = client.submit(piece, 1, 10, 0, workers=addresses(client, host), allow_other_workers=True)
        made.result(timeout=60)
        begun = time.monotonic()
        host.freeze(True)
        try:
            reason = "no worker of its host was heard of any more, although its connection stands"
            eventually(lambda: seen(cluster, host) == {("lost", reason)}, "it is given up", 60)
            assert time.monotonic() - begun > 14, "not before a fifth of worker-ttl"
            with pytest.raises(CancelledError):
                held.result(timeout=30)
            assert made.result(timeout=60).sum() == piece(1, 10, 0).sum()
        finally:
            host.freeze(False)
        eventually(lambda: seen(cluster, host) == {("ready", None)}, "it is back", 90)
        assert len(addresses(client, host)) == 2
