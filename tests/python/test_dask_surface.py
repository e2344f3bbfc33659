"""What we use of Dask beyond its documentation: every name is there, and takes what we give it.

Run with the oldest and the newest Dask that we claim, so that a release which changes one of them
is one red line here.
"""

import ast
import asyncio
import importlib
import inspect
import json
import re
import socket
import sys
from pathlib import Path

import distributed
import pytest
from conftest import ROOT
from cuda_cluster import _internals

# What runs in Dask's processes.
ENGINE = ROOT / "crates/cluster/src/python"
sys.path.insert(0, str(ENGINE))
from cuda_cluster_dask import internals  # noqa: E402

#: The packages, each with its module that alone may use what Dask's documentation does not have.
SIDES = {internals: ENGINE / "cuda_cluster_dask", _internals: ROOT / "python/cuda_cluster"}

#: Names with where they are used and the newest release in which they were seen.
SEEN = [
    (path, name, side.__name__, version)
    for side in SIDES
    for version, paths in side.SEEN.items()
    for path, names in paths.items()
    for name in names.split()
]

#: Functions, and the parameters that we give them by name.
CALLED = {
    "distributed.Client._ensure_connected": "timeout",
    "distributed.Scheduler.__init__": "protocol host interface port security dashboard "
    "dashboard_address http_prefix scheduler_file",
    "distributed.Scheduler.adaptive_target": "",
    "distributed.Scheduler.close": "reason",
    "distributed.Scheduler.identity": "n_workers",
    "distributed.Scheduler.log_event": "topic msg",
    "distributed.Scheduler.remove_worker": "address stimulus_id",
    "distributed.Scheduler.retire_workers": "workers names close_workers remove",
    "distributed.Scheduler.workers_to_close": "minimum target attribute",
    "distributed.Worker.__init__": "name nthreads protocol security memory_limit data plugins resources "
    "local_directory dashboard dashboard_address http_prefix preload death_timeout lifetime host "
    "interface port contact_address",
    "distributed.Worker.close": "executor_wait nanny reason",
    "distributed.Worker.close_gracefully": "restart reason",
    "distributed.Worker.gather_dep": "worker to_gather total_nbytes stimulus_id",
    "distributed.comm.utils.from_frames": "deserialize deserializers allow_offload",
    "distributed.comm.utils.to_frames": "serializers on_error context allow_offload frame_split_size",
    "distributed.core.rpc.__init__": "connection_args",
    "distributed.deploy.Cluster.__init__": "asynchronous loop quiet name scheduler_sync_interval",
    "distributed.deploy.Cluster._repr_html_": "cluster_status",
    "distributed.deploy.Cluster._update_worker_status": "op msg",
    "distributed.deploy.adaptive_core.AdaptiveCore.__init__": "minimum maximum wait_count",
    # What the core gives to the methods that it has no more than stubs of.
    "distributed.deploy.Adaptive.scale_down": "workers",
    "distributed.deploy.Adaptive.scale_up": "n",
    "distributed.diskutils.WorkSpace.new_work_dir": "prefix",
    "distributed.spill.SpillBuffer.__init__": "spill_directory target max_spill",
    "distributed.spill.SpillBuffer.evict": "",
}

#: What we override: it takes what its base takes, by whose callers it is called.
OVERRIDDEN = {
    "cuda_cluster_dask.scheduler.Supervised": "restart_workers register_nanny_plugin",
    "cuda_cluster_dask.worker.Supervised": "gather_dep execute close close_gracefully",
    "cuda_cluster_dask.adaptive.Adaptive": "target workers_to_close",
    "cuda_cluster.comm.Direct": "read write close abort closed",
    "cuda_cluster.comm.DirectConnector": "connect",
    "cuda_cluster.comm.DirectListener": "start stop",
    "cuda_cluster.dask.LocalCUDACluster": "_start _close _update_worker_status _repr_html_ close",
}

#: What we send, and the reasons for which a worker closes; where `distributed` has them.
TEXTS = {
    "distributed.scheduler": [
        internals.CLUSTER_ENDS,
        "scheduler-close-worker",
        "scheduler-remove-worker",
        internals.REGISTER_NANNY,
        internals.NANNY_PLUGINS,
    ],
    "distributed.worker": ["worker-close", internals.LIFETIME, "worker-heartbeat-missing"],
    "distributed.nanny": internals.OF_A_NANNY,
}


def named(path):
    """The object of a dotted path."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no {path}")


def is_there(path, name):
    """Whether an object has a name: a class also if its instances have, as its source says."""
    found = named(path)
    if hasattr(found, name) or not inspect.isclass(found):
        return hasattr(found, name)
    own = [one for one in found.__mro__ if one.__module__ != "builtins"]
    pattern = rf"\bself\.{name}\b|^    {name}:"
    return any(re.search(pattern, inspect.getsource(one), re.MULTILINE) for one in own)


def test_what_dasks_documentation_does_not_have_is_there():
    gone = [
        f"{path}.{name}, used by {side}, was last seen in {version}"
        for path, name, side, version in SEEN
        if not is_there(path, name)
    ]
    assert not gone, f"gone in Dask {distributed.__version__}: " + "; ".join(gone)


def imported(file):
    """What a file imports from Dask's modules, as `module.name`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.module, one.name) for one in node.names)


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.__name__)
def test_one_module_imports_what_dasks_documentation_does_not_have(side):
    listed = {(path, name) for path, name, user, _ in SEEN if user == side.__name__}
    for file in SIDES[side].rglob("*.py"):
        for module, name in imported(file):
            # What `distributed` itself exports is documented, and so are these.
            inside = module.startswith(("distributed.", "dask.")) and module not in (
                "dask.utils",
                "dask.config",
            )
            if inside and "_instead" not in file.parts:
                assert file.name == Path(side.__file__).name, f"{file} imports {name} from {module}"
                assert (module, name) in listed, f"{side.__name__} does not list {module}.{name}"


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.__name__)
def test_what_is_listed_is_used(side):
    text = "".join(file.read_text().replace("SEEN", "") for file in SIDES[side].rglob("*.py"))
    unused = [name for _, name, user, _ in SEEN if user == side.__name__ and text.count(name) < 2]
    assert not unused


@pytest.mark.parametrize("function", CALLED)
def test_what_we_call_takes_our_arguments(function):
    known = inspect.signature(named(function)).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    assert takes_any or set(CALLED[function].split()) <= known.keys()


@pytest.mark.parametrize(
    "path, method", [(path, name) for path, names in OVERRIDDEN.items() for name in names.split()]
)
def test_what_we_override_takes_what_its_callers_give(path, method):
    kind = named(path)
    ours = inspect.signature(getattr(kind, method)).parameters
    base = next(base for base in kind.__mro__[1:] if method in vars(base))
    theirs = inspect.signature(getattr(base, method)).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in ours.values())
    assert takes_any or theirs.keys() - {"args", "kwargs"} <= ours.keys()
    added = [ours[name] for name in ours.keys() - theirs.keys()]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert all(one.default is not one.empty or one.kind in variable for one in added)


@pytest.mark.parametrize("module, text", [(module, text) for module in TEXTS for text in TEXTS[module]])
def test_what_we_send_and_understand_is_said_in_these_words(module, text):
    assert re.search(rf"\b{text}\b", inspect.getsource(named(module)))


@pytest.mark.parametrize("module", ["scheduler", "worker"])
def test_a_dashboard_can_be_connected_later(module):
    pytest.importorskip("bokeh")
    connect = named(f"distributed.dashboard.{module}.connect")
    inspect.signature(connect).bind("application", "http server", "server", prefix="")


def test_what_distributed_ucxx_does_not_document_is_there():
    pytest.importorskip("distributed_ucxx")
    module = named("distributed_ucxx.ucxx")
    assert hasattr(module, "init_once") and "self._ep_handle" in inspect.getsource(module.UCXX)


def test_a_scheduler_does_not_wait_for_a_supervisor_that_reads_nothing():
    from cuda_cluster_dask.status import Status

    async def tells():
        ours, theirs = socket.socketpair()
        status = Status(ours.fileno())
        for number in range(3000):
            worker = {"name": f"worker {number % 2000}", "address": "tcp://" + "x" * 100}
            status.joined(worker)
            status.parted(worker["name"], True, str(number))
        # Now it reads.
        theirs.settimeout(0)
        text = b""
        for _ in range(1000):
            await asyncio.sleep(0.001)
            try:
                text += theirs.recv(1 << 20)
            except BlockingIOError:
                break
        ours.close()
        theirs.close()
        return [json.loads(line) for line in text.splitlines()]

    told = asyncio.run(tells())
    last = {}
    for one in told:
        last[one["worker"]["name"] if one["status"] == "joined" else one["name"]] = one
    assert len(last) == 2000, "each is told of"
    for number in range(2000):
        newest = number + 2000 if number < 1000 else number
        assert last[f"worker {number}"]["reason"] == str(newest)
