"""Keywords and settings of wrong types are refused by their names, before anything starts."""

import inspect
import math
import os
import re
from datetime import timedelta
from pathlib import Path

import cuda_cluster
import dask
import numpy
import pytest
from conftest import MACHINE, QUIET, files
from cuda_cluster import _settings, accepted, program
from cuda_cluster.dask import CUDAWorker, LocalCUDACluster, cuda_worker, keywords
from distributed import Client, LocalCluster, Worker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Strange:
    """Nothing that a keyword could mean."""


#: What no keyword takes; and of what one takes, what another does not.
WRONG = [Strange(), b"/tmp", [Strange()], {"A": Strange()}, {5: "A"}, 1j]

#: Of these, what is asked for is for Dask to say, or is no value but an object.
NOT_OURS = {"loop", "security", "worker_kwargs", "kwargs", "self"}

#: By the class's own words.
MODULES = ("pre_import", "rmm_allocator_external_lib_list")


def of_the_class():
    known = set(inspect.signature(LocalCUDACluster.__init__).parameters)
    return sorted(known | keywords.ACCEPTED.keys() - {"nthreads", "join"} - NOT_OURS - {"kwargs"})


@pytest.mark.parametrize("name", sorted(set(of_the_class()) - NOT_OURS))
def test_a_keyword_of_a_wrong_type_is_refused_by_its_name(name):
    before = os.listdir(".")
    for wrong in WRONG:
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must be "):
            LocalCUDACluster(**{**QUIET, name: wrong})
    assert os.listdir(".") == before and not files(), "nothing was made"


@pytest.mark.parametrize("name", ["pre_import", "local_directory", "name", MODULES[1]])
def test_a_nul_character_is_refused_by_the_name_of_its_keyword(name):
    with pytest.raises(ValueError, match=rf"^{name} must not contain a NUL character"):
        LocalCUDACluster(**{**QUIET, name: "a\0b"})
    with pytest.raises(ValueError, match=rf"^{name} must not contain half of a character"):
        LocalCUDACluster(**{**QUIET, name: "a\ud800b"})
    with pytest.raises(ValueError, match=r"^no_such_flag must not contain a NUL character"):
        cuda_cluster.plan(**MACHINE, no_such_flag="a\0b")


def test_a_number_of_workers_that_is_too_large_is_refused_by_its_name():
    for more in ({}, {"workers_per_gpu": 3}):
        with pytest.raises(ValueError, match=r"^n_workers='10{30}': it is too large"):
            LocalCUDACluster(**QUIET, n_workers=10**30, **more)


@pytest.mark.parametrize("name", sorted(accepted.FLAGS))
def test_a_flag_of_a_wrong_type_is_refused_by_its_name(name):
    for wrong in WRONG:
        for ask in (cuda_cluster.up, cuda_cluster.plan):
            with pytest.raises(TypeError, match=rf"^{name} must be "):
                ask(**{**MACHINE, name: wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": 5},
        {"host": 5},
        {"env": ["A"]},
        {"env": {"A": Strange()}},
        {"worker_class": 5},
        {"topology": 5},
        {"CUDA_VISIBLE_DEVICES": Strange()},
        {"name": 7},
        {"name": "a\0b"},
        {"interface": ["lo"]},
        {"rmm_pool_size": [1]},
        {"rmm_pool_size": True},
        {"silence_logs": "loud"},
        {"silence_logs": "loud", "relay": False},
        {"local_directory": b"/tmp"},
        {"n_workers": True},
        {"n_workers": 2.5},
        {"threads_per_worker": "2"},
        {"preload": [5]},
        {"pre_import": [5]},
        {"enable_nvlink": "yes"},
        {"spec": [5]},
        {"config": {"a": {"b": [Strange()]}}},
        {"memory_target_fraction": "much"},
        {"dashboard_address": [8787]},
    ],
    ids=str,
)
def test_what_was_taken_without_a_word_is_refused_by_its_name(wrong):
    with pytest.raises((TypeError, ValueError), match=rf"^{next(iter(wrong))} must "):
        LocalCUDACluster(**{**QUIET, **wrong})
    with pytest.raises(TypeError, match="^scheduler must be a text, not 5"):
        CUDAWorker(5)
    for ask in (cuda_cluster.attach, LocalCUDACluster.from_name):
        with pytest.raises(TypeError, match="^name must be a text, not 5"):
            ask(5)
    with pytest.raises(TypeError, match="^source must be a path"):
        cuda_cluster.topology(5)


@pytest.mark.parametrize(
    "given, flags",
    [
        ({"n_workers": numpy.int64(2), "start_workers": 1}, {"n_workers": 2}),
        # Which the program refuses.
        ({"n_workers": 2, "start_workers": 0}, {"n_workers": 2, "start_workers": 0}),
        ({"threads_per_worker": None}, {"threads_per_worker": 1}),
        ({"CUDA_VISIBLE_DEVICES": (0, "1")}, {"gpus": "0,1"}),
        ({"CUDA_VISIBLE_DEVICES": numpy.arange(2)}, {"gpus": "0,1"}),
        ({"CUDA_VISIBLE_DEVICES": 3}, {"gpus": "3"}),
        ({"local_directory": Path("/tmp")}, {"local_directory": "/tmp"}),
        ({"topology": Path("dgx-h100")}, {"topology": "dgx-h100"}),
        ({"memory_limit": numpy.float64(1e9)}, {"memory_limit": 10**9}),
        ({"memory_limit": numpy.int32(0)}, {"memory_limit": "none"}),
        ({"memory_limit": False}, {"memory_limit": "none"}),
        ({"rmm_async": numpy.True_}, {"rmm_async": True}),
        ({"rmm_async": 1}, {"rmm_async": True}),
        ({"enable_nvlink": numpy.False_, "protocol": "tcp"}, {"enable_nvlink": False}),
        ({"pre_import": ("a", "b")}, {"pre_import": ["a", "b"]}),
        ({"preload": [Path("own.py")]}, {"preload": ["own.py"]}),
        ({"lifetime": timedelta(minutes=1)}, {"lifetime": "60.0s"}),
        ({"lifetime": 60}, {"lifetime": 60}),
        ({"dashboard_address": 8787}, {"dashboard_address": ":8787"}),
        ({"dashboard_address": None}, {"dashboard": False}),
        ({"scheduler_port": numpy.uint16(8786)}, {"scheduler_port": 8786}),
        ({"resources": {"GPU": numpy.float32(2)}}, {"resources": {"GPU": 2.0}}),
        ({"worker_class": "a.B"}, {"worker_class": "a.B"}),
    ],
    ids=str,
)
def test_what_dasks_users_may_give_means_what_it_means_to_dask(given, flags):
    request = keywords.translate(given)
    assert {name: request.flags[name] for name in flags} == flags
    assert {type(request.flags[name]).__module__ for name in flags} == {"builtins"}


def test_environments_and_configurations_are_texts_numbers_and_what_is_made_of_them():
    env = {"A": 1, "B": Path("/b"), "C": True, "D": "d"}
    config = {"a": {"b": (1, 2), "c": [{"d": numpy.int64(3)}], "e": None, "f": Path("/f")}}
    request = keywords.translate({"env": env, "config": config})
    assert {"worker": {"env": {"A": "1", "B": "/b", "C": "True", "D": "d"}}} in request.specs
    told = {"a.b": "(1, 2)", "a.c": "[{'d': 3}]", "a.f": "/f"}
    assert {"dask": {"config": told}} in request.specs


def test_every_flag_of_the_program_says_what_it_takes():
    shown = program.run(["up", "--help"])
    flags = {flag.replace("-", "_") for flag in re.findall(r"^\s+(?:-\w, )?--([a-z-]+)", shown, re.M)}
    opposites = {flag for flag in flags if flag.startswith(("disable_", "no_"))}
    about_programs = {"help", "output", "owner", "detach", "dry_run", "plan", "file", "preflight", "verbose"}
    assert flags - opposites - about_programs == accepted.FLAGS.keys() - {"nthreads", "spec"}


def test_every_keyword_of_the_class_says_what_it_takes():
    """Those of a worker that have no flag are Dask's to judge."""
    own = set(inspect.signature(LocalCUDACluster.__init__).parameters)
    own |= set(inspect.signature(LocalCluster.__init__).parameters)
    refused = keywords.REFUSED.keys() | keywords.WITHOUT_MEANING | {"worker_services"}
    known = keywords.ACCEPTED.keys() | {*MODULES, "silence_logs"}
    assert own - NOT_OURS - refused - known == set()
    assert set(inspect.signature(Worker.__init__).parameters) & {"n_workers"} == set()


@pytest.mark.parametrize("key", sorted(_settings.KINDS))
def test_a_setting_of_a_wrong_type_is_refused_by_its_key(key):
    for wrong in [*WRONG, *[None for _ in {key} & _settings.NEEDED]]:
        with dask.config.set({key: wrong}), pytest.raises(TypeError, match=rf"^{key} must be "):
            _settings.setting(key)
    with dask.config.set({"distributed.comm.direct.devices": "no"}):
        with pytest.raises(TypeError, match="devices must be True or False, not 'no'"):
            _settings.setting("distributed.comm.direct.devices", True)


@pytest.mark.parametrize(
    "key, wrong",
    [
        ("direct.route", "fast"),
        ("direct.route", 5),
        ("direct.keep-memory", "5 bananas"),
        ("direct.keep-memory", -1),
        ("direct.keep-memory", "9e99"),
        ("direct.keep-memory", float("inf")),
        ("direct.devices", "perhaps"),
        ("direct.secret-file", 5),
        ("direct.secret-file", "\ud800"),
        ("timeouts.tcp", 2**70),
        ("timeouts.tcp", ""),
        ("timeouts.connect", "soon"),
        ("socket-backlog", 2**70),
    ],
)
def test_a_wrong_setting_of_connections_is_told_by_its_key_before_anything_starts(key, wrong):
    key = f"distributed.comm.{key}"
    with (
        dask.config.set({key: wrong}),
        pytest.raises((TypeError, ValueError), match=f"^{key} must (be|not) "),
    ):
        LocalCUDACluster(**QUIET)
    with pytest.raises((TypeError, ValueError), match=f"^({key}|config) must (be|not) "):
        LocalCUDACluster(**QUIET, config={key: wrong})
    assert not files(), "nothing was made"


def test_a_setting_that_is_left_empty_is_as_if_it_was_not_there():
    with dask.config.set({"distributed.comm.direct.keep-memory": None}):
        assert _settings.setting("distributed.comm.direct.keep-memory", 5) == 5


@pytest.mark.parametrize("interval", ["", -1, "x", float("nan"), float("inf")])
def test_an_interval_that_is_none_is_refused_by_its_name(interval):
    with pytest.raises(ValueError, match="^scheduler_sync_interval must be a time"):
        LocalCUDACluster(**QUIET, scheduler_sync_interval=interval)


@pytest.mark.parametrize("name", ["silence_logs", *keywords.REFUSED])
def test_an_array_is_refused_like_all_else(name):
    with pytest.raises(ValueError, match=f"^{name} "):
        LocalCUDACluster(**QUIET, **{name: numpy.array([1, 2])})


def test_a_loop_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="^loop must be a tornado IOLoop or None, not 'x'"):
        LocalCUDACluster(**QUIET, loop="x")


def test_what_was_set_here_reaches_the_workers_or_is_said_not_to():
    with dask.config.set({"a.path": Path("/a"), "a.number": numpy.int64(3)}):
        here = keywords.set_here()
    assert (here["a.path"], here["a.number"]) == ("/a", "3")
    with dask.config.set({"a.most": math.inf, "a.list": [-math.inf, "inf"]}):
        here = {key: dask.config.interpret_value(text) for key, text in keywords.set_here().items()}
    assert (here["a.most"], here["a.list"]) == (math.inf, [-math.inf, "inf"])
    with dask.config.set({"a.number": math.nan}):
        with pytest.warns(UserWarning, match="a.number: nan .*does not reach"):
            assert "a.number" not in keywords.set_here()
    with dask.config.set({"a.strange": Strange()}):
        with pytest.warns(UserWarning, match="a.strange .*does not reach"):
            assert "a.strange" not in keywords.set_here()


def test_variables_that_dask_is_configured_to_give_workers_are_theirs(monkeypatch):
    pre, post = keywords.OF_NANNIES
    monkeypatch.setenv("FROM_OUTSIDE", "1")
    given = {pre: {"A": 1, "B": "pre", "OMP_NUM_THREADS": 3, "FROM_OUTSIDE": 2}, post: {"B": "post"}}
    with dask.config.set(given):
        [request, *_] = keywords.translate({}).specs
        assert request == {"worker": {"env": {"A": "1", "B": "post", "OMP_NUM_THREADS": "3"}}}
        *_, own = keywords.translate({"env": {"B": "own"}}).specs
        assert own == {"worker": {"env": {"B": "own"}}}, "the keyword wins"
        with LocalCUDACluster(**QUIET, n_workers=1) as cluster, Client(cluster) as client:
            [found] = client.run(lambda: [os.environ.get(n) for n in ("A", "B", "OMP_NUM_THREADS")]).values()
            assert found == ["1", "post", "3"]
    with (
        dask.config.set({pre: {"OMP_NUM_THREADS": None}}),
        pytest.warns(UserWarning, match="cannot be left out"),
    ):
        assert not any("worker" in spec for spec in keywords.translate({}).specs)
    for wrong in ([1], 5):
        with dask.config.set({post: wrong}), pytest.raises(TypeError, match=f"^{post} must be "):
            keywords.translate({})


def test_a_key_in_place_of_its_files_path_is_refused_and_not_shown():
    secret = "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n"
    with pytest.raises(ValueError, match="^tls_key must be the path of a file") as error:
        cuda_cluster.plan(**MACHINE, engine="dask", tls_key=secret)
    assert "abc" not in str(error.value)


#: What YAML has only as escapes, and some that it may have.
ODD = "".join(
    map(chr, [*range(1, 0x100), 0x2028, 0x2029, 0xD7FF, 0xE000, 0xFEFF, 0xFFFD, 0xFFFE, 0xFFFF, 0x1FFFE])
)


def test_texts_of_every_script_are_taken_and_bytes_that_are_none_are_refused_by_their_key():
    plan = cuda_cluster.plan(**MACHINE, engine="dask", spec={"worker": {"env": {"A": "😀 “é”", "B": ODD}}})
    env = plan.json["workers"][0]["env"]
    assert (env["A"], env["B"]) == ("😀 “é”", ODD)
    with dask.config.set({"a.b": "😀"}):
        with LocalCUDACluster(**QUIET, n_workers=1, env={"E": "😀"}) as cluster, Client(cluster) as client:
            [found] = client.run(lambda: (os.environ["E"], dask.config.get("a.b"))).values()
            assert found == ("😀", "😀")
    with pytest.raises(ValueError, match=r"worker\.env\.E must be text"):
        LocalCUDACluster(**QUIET, n_workers=1, env={"E": "\udc80"})


def test_a_scheduler_to_join_needs_no_protocol_wherever_dask_takes_it_from():
    def joined(**given):
        return cuda_worker.translate(given).flags["join"]

    assert joined(scheduler="10.0.0.1:8786") == "tcp://10.0.0.1:8786"
    with dask.config.set({"scheduler-address": "10.0.0.1:8786"}):
        assert joined() == "tcp://10.0.0.1:8786"
        assert joined(scheduler="ucxx://10.0.0.2:1") == "ucxx://10.0.0.2:1"
        assert joined(scheduler_file="scheduler.json") == "scheduler.json"


def planned_with(chooses, **more):
    asked = {"topology": "dgx-h100", "protocol": "ucx", "enable_infiniband": True, **more}
    request = keywords.translate({"net_devices": chooses, **asked})
    return cuda_cluster.plan(spec=request.specs, **request.flags)


def test_a_function_chooses_nics_gpu_by_gpu():
    as_planned = [worker.nics for worker in planned_with(None).workers]
    ports = [port for [port] in as_planned]
    seen = []

    def chooses(gpu):
        seen.append((gpu.index, gpu.numa, gpu.pci))
        assert {port[:-2] for port in ports} < {nic.name for nic in gpu.nics}
        return {0: [ports[3], ports[4]], 1: None, 2: "none"}.get(gpu, ports[gpu // 2])

    plan = planned_with(chooses)
    known = [(gpu.index, gpu.numa, gpu.pci) for gpu in cuda_cluster.topology("dgx-h100").gpus]
    assert seen == known
    nics = [worker.nics for worker in plan.workers]
    assert nics[:3] == [[ports[3], ports[4]], [ports[1]], []]
    assert nics[3:] == [[ports[index // 2]] for index in range(3, 8)]


def test_a_function_is_asked_of_gpus_with_workers_alone():
    seen = []
    planned_with(lambda gpu: seen.append(int(gpu)), CUDA_VISIBLE_DEVICES="5,2")
    assert sorted(seen) == [2, 5]


@pytest.mark.parametrize(
    ("answer", "words"),
    [(5, "says 5 of GPU 0"), ([""], r"says \[''\] of GPU 0"), ("mlx9_9:1", "mlx9_9")],
)
def test_what_a_function_may_not_say_is_refused_before_anything_starts(answer, words):
    with pytest.raises((TypeError, ValueError), match=words):
        planned_with(lambda gpu: answer)


def test_a_function_and_overrides_are_two_ways_to_one_end():
    overrides = {"overrides": [{"match": {"gpu": "0"}, "threads": 2}]}
    with pytest.raises(ValueError, match="two ways to one end"):
        planned_with(lambda gpu: None, spec=overrides)
