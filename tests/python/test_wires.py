"""Tasks are placed by the wires between workers: what decides is pure (`cuda_cluster_dask.wires`), and stands
in Dask's scheduler only while wires differ and its methods are those that were read (`hooks`)."""

import asyncio
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "crates/cluster/src/python"), str(Path(__file__).with_name("wires"))]

import dask  # noqa: E402
from distributed import Client, Scheduler, Worker, wait  # noqa: E402

from cuda_cluster_dask import by_wires, hooks  # noqa: E402
from cuda_cluster_dask.wires import Pair, Place, Table, Wires, arrival, sooner  # noqa: E402

MIB = 1 << 20


def table(rates, workers="abcd"):
    return Table.of(rates, {one: one for one in workers})


#: a and b are near, b and c too; a and c are not.
CHAIN = {
    (one, other): rate
    for pair, rate in {"ab": 10e6, "bc": 10e6, "ac": 1e6, "ad": 1e6, "bd": 1e6, "cd": 10e6}.items()
    for one, other in (pair, pair[::-1])
}


def test_what_workers_report_goes_before_what_was_measured_and_that_before_the_plan():
    wires = Wires({"a": {"b": 8e9, "c": 4e9}, "b": {"a": 8e9}})
    assert wires.rates()["a", "b"] == 8e9
    wires.measure("a", "b", 5e9)
    assert wires.rates()["a", "b"] == 5e9
    wires.learn("a", "b", 2e9, 2)
    assert wires.rates()["a", "b"] == 5e9, "two reports are few"
    wires.learn("a", "b", 2e9)
    assert wires.rates()["a", "b"] == 2e9
    # What is reached of the plan where it is known is expected elsewhere, too.
    assert wires.rates()["a", "c"] == pytest.approx(1e9)
    assert wires.rates()["b", "a"] == pytest.approx(2e9)


def test_a_pair_that_changes_is_followed():
    pair = Pair()
    pair.learn(10e6, 1)
    for _ in range(10):
        pair.learn(1e6, 2)
    assert pair.learned == pytest.approx(1e6, rel=0.05) and pair.reports == 21


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "fast", None])
def test_what_cannot_be_a_rate_teaches_nothing(rate):
    wires = Wires({"a": {"b": rate}})
    wires.learn("a", "b", rate, 5)
    wires.measure("a", "b", rate)
    assert wires.rates() == {}


def test_equal_wires_and_none_do_not_differ():
    assert not table({}).differ
    same = {(a, b): 5e6 for a in "abcd" for b in "abcd" if a != b}
    assert not table(same).differ
    # A machine with load makes some look half as fast.
    assert not table({**same, ("a", "b"): 2.5e6, ("b", "c"): 2e6}).differ
    assert table(CHAIN).differ
    # Workers that are gone are not in it.
    assert not table(CHAIN, "abx").differ


def test_of_several_holders_those_about_as_fast_as_the_fastest_are_good():
    wires = table({("a", "d"): 10e6, ("b", "d"): 6e6, ("c", "d"): 1e6})
    assert wires.good(["a", "b", "c"], "d") == ["a", "b"]
    assert wires.good(["c"], "d") == ["c"]
    assert wires.fastest(["b", "c"], "d") == pytest.approx(1 / 6e6)


def test_wires_work_side_by_side_and_each_in_turn():
    wires = table(CHAIN)
    assert arrival(wires, Place("b", 0), [(10e6, "a"), (20e6, "c")]) == pytest.approx(2.0)
    assert arrival(wires, Place("b", 0), [(10e6, "a"), (20e6, "a")]) == pytest.approx(3.0)
    assert arrival(wires, Place("b", 0, {"a": 5e6}), [(10e6, "a")]) == pytest.approx(1.5)
    assert arrival(wires, Place("b", 0, {"a": 50e6}), [(10e6, ("a", "c"))]) == pytest.approx(1.0)
    assert arrival(wires, Place("b", 0), []) == 0


def test_a_worker_between_two_that_are_far_from_each_other_gets_the_task():
    wires = table(CHAIN)
    usual = Place("a", 0), [(4e6, "c")]
    between = Place("b", 0), [(4e6, "a"), (4e6, "c")]
    assert sooner(wires, usual, [between]) == "b"
    assert sooner(wires, usual, [(Place("b", 4.1), between[1])]) is None, "it is busy"
    assert sooner(wires, usual, [(Place("d", 0), between[1])]) is None, "it is as far"
    assert sooner(wires, (Place("a", 9), usual[1]), [(Place("b", 8), between[1])]) == "b"
    assert sooner(wires, (Place("a", 9), []), [between]) is None, "it is only busy"
    small = Place("a", 0), [(4e3, "c")]
    assert sooner(wires, small, [(Place("b", 0), [(4e3, "a"), (4e3, "c")])]) is None


def test_the_choice_is_the_same_whatever_the_order():
    state = np.random.default_rng(3)
    names = "abcdefgh"
    for _ in range(300):
        rates = {(a, b): float(state.uniform(1e6, 5e7)) for a in names for b in names if a != b}
        wires = table(rates, names)
        size, holders = float(state.uniform(1e5, 1e8)), list(state.choice(list(names), 2, replace=False))
        places = [
            (Place(one, float(state.uniform(0, 1))), [(size, (h,)) for h in holders if h != one])
            for one in names
        ]
        usual = next(place for place in places if place[0].worker == holders[0])
        others = [place for place in places if place is not usual]
        found = sooner(wires, usual, others)
        assert found == sooner(wires, usual, others[::-1])
        came = arrival(wires, *usual)
        begin = max(came, usual[0].busy)
        comes = {place.worker: arrival(wires, place, needs) for place, needs in others if place.busy <= begin}
        best = min(comes.values(), default=9e9)
        if found is None:
            assert best > came * 0.8 or best > came - 0.005
        else:
            assert comes[found] == best < came


def run(story, workers=3, **config):
    """A story with a scheduler, its plugin and so many workers of this process."""

    async def told(rates):
        with dask.config.set({"distributed.scheduler.work-stealing-interval": "1h", **config}):
            async with Scheduler(dashboard=False, dashboard_address=":0", port=0, validate=True) as scheduler:
                following = by_wires.add(scheduler, rates, True)
                async with (
                    Worker(scheduler.address, name="a") as a,
                    Worker(scheduler.address, name="b") as b,
                    Worker(scheduler.address, name="c") as c,
                ):
                    async with Client(scheduler.address, asynchronous=True) as client:
                        plugin = scheduler.plugins.get(by_wires.ByWires.name)
                        await asyncio.sleep(0.1)
                        await story(client, scheduler, plugin, (a, b, c))
                if following is not None:
                    following.cancel()

    rates = {"a": {"b": 0.01, "c": 0.001}, "b": {"a": 0.01, "c": 0.01}, "c": {"a": 0.001, "b": 0.01}}
    asyncio.run(told(rates))


def block(size=4 * MIB):
    return np.ones(size, "u1")


def both(one, other):
    return int(one[0]) + int(other[0])


def test_dask_places_a_task_between_two_that_are_far_from_each_other():
    async def story(client, scheduler, plugin, workers):
        assert plugin.hooks.there
        # As Dask learns that it takes long; else whoever is idle would look worse than it is.
        one, other = (client.submit(block, workers=[name], key=f"of-{name}") for name in "ac")
        await wait([one, other])
        result = client.submit(both, one, other, key="both")
        assert await result == 2
        (at,) = scheduler.tasks["both"].who_has
        assert at.name == "b" and plugin.hooks.moved == 1
        # Restrictions go before wires.
        result = client.submit(both, other, one, key="again", workers=["a"])
        assert await result == 2
        assert {ws.name for ws in scheduler.tasks["again"].who_has} == {"a"}

    run(story)


def test_a_worker_is_sent_to_the_nearest_holder():
    async def story(client, scheduler, plugin, workers):
        a, b, c = workers
        data = client.submit(block, workers=["a"], key="data")
        await wait(data)
        await client.replicate([data], workers=[b.address], n=1)
        assert {ws.name for ws in scheduler.tasks["data"].who_has} == {"a", "b"}
        assert await client.submit(len, data, workers=["c"], key="len") == 4 * MIB
        (log,) = [one for one in c.transfer_incoming_log if "data" in one["keys"]]
        assert log["who"] == b.address

    run(story)


def test_what_is_copied_to_all_goes_along_the_fast_wires():
    async def story(client, scheduler, plugin, workers):
        data = client.submit(block, workers=["a"], key="data")
        await wait(data)
        await client.replicate([data])
        assert {ws.name for ws in scheduler.tasks["data"].who_has} == {"a", "b", "c"}
        to_whom = {w.name: log["who"] for w in workers for log in w.transfer_outgoing_log}
        assert to_whom == {"a": workers[1].address, "b": workers[2].address}

    run(story)


def test_a_worker_that_goes_while_a_copy_to_it_waits_for_its_turn_is_left_out():
    async def story(client, scheduler, plugin, workers):
        b = workers[1]
        data = client.submit(block, workers=["a"], key="data")
        await wait(data)
        # As while workers are retired.
        async with scheduler._replica_lock("retire-workers"):
            copying = asyncio.ensure_future(scheduler.replicate(keys=["data"]))
            await asyncio.sleep(0.1)
            assert not copying.done()
            await scheduler.remove_worker(b.address, stimulus_id="test")
        await copying
        assert {ws.name for ws in scheduler.tasks["data"].who_has} == {"a", "c"}

    run(story)


def test_a_holder_that_was_chosen_and_has_died_is_replaced_by_another():
    async def story(client, scheduler, plugin, workers):
        a, b, c = workers
        data = client.submit(block, workers=["a"], key="data")
        await wait(data)
        await client.replicate([data], workers=[a.address, b.address])
        # The scheduler does not know yet that it is gone.
        b.handlers["get_data"] = lambda **_: {"status": "OK", "data": {}}
        assert await client.submit(len, data, workers=["c"], key="len") == 4 * MIB

    run(story)


def test_equal_wires_leave_the_scheduler_as_it_came():
    async def story(client, scheduler, plugin, workers):
        assert plugin.hooks.there
        for sender in "abc":
            for receiver in "abc":
                if sender != receiver:
                    plugin.wires.learn(sender, receiver, 5e6, 10)
        plugin._decide()
        assert not plugin.hooks.there
        assert "get_comm_cost" not in vars(scheduler)
        assert scheduler.handlers["replicate"].__func__ is Scheduler.replicate
        assert hooks.strange(scheduler) is None

    run(story)


def test_workers_reports_are_learned_from():
    async def story(client, scheduler, plugin, workers):
        data = client.submit(block, workers=["a"], key="data")
        await client.submit(len, data, workers=["c"])
        pair = plugin.wires._pairs["a", "c"]
        while not pair.reports:
            await asyncio.sleep(0.05)
        assert pair.reports == 1 and pair.learned > 1e6

    run(story)


@pytest.mark.parametrize(
    "metrics",
    [{}, {"bandwidth": 5}, {"bandwidth": {"workers": {"x": 5}}}, {by_wires.METRIC: [1]}, {by_wires.METRIC: None}],
)
def test_reports_that_make_no_sense_teach_nothing(metrics):
    async def story(client, scheduler, plugin, workers):
        assert not plugin._learn("a", metrics)

    run(story)


def test_a_dask_that_is_not_known_is_left_alone(caplog, monkeypatch):
    monkeypatch.setattr(Scheduler, "get_comm_cost", lambda self, ts, ws, more: 0)

    async def story():
        async with Scheduler(dashboard=False, dashboard_address=":0", port=0) as scheduler:
            with caplog.at_level(logging.WARNING, "distributed.scheduler"):
                assert by_wires.add(scheduler, {}, True) is None
            assert by_wires.ByWires.name not in scheduler.plugins

    asyncio.run(story())
    assert "get_comm_cost(ts, ws) is not there" in caplog.text


@pytest.mark.parametrize("word, is_on", [("true", True), ("false", False), (None, None)])
def test_dasks_configuration_goes_before_the_plan(word, is_on):
    async def story(asked):
        async with Scheduler(dashboard=False, dashboard_address=":0", port=0) as scheduler:
            following = by_wires.add(scheduler, {}, asked)
            assert (following is not None) == (asked if is_on is None else is_on)
            if following is not None:
                following.cancel()

    variables = {} if word is None else {"DASK_CUDA_CLUSTER__PLACE_BY_WIRES": word}
    with dask.config.set(dask.config.collect_env(variables)):
        asyncio.run(story(True))
        asyncio.run(story(False))


def test_random_graphs_with_kills_have_the_results_that_they_have_without_dask(nothing_is_left):
    import graphs

    # Of these seeds, two fill a worker's memory.
    assert all(graphs.main(6, first=8)), "nothing was moved, paused or written"
