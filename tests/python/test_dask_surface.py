"""What we use of Dask beyond its documentation: every name is there, and takes what we give it.

Run with the oldest and the newest Dask that we claim, so that a release which changes one of them
is one red line here.
"""

import importlib
import importlib.util
import inspect
import re
import sys

import pytest
from conftest import ROOT

#: Modules, and the names that we import from them.
IMPORTED = {
    "dask.config": "collect collect_env collect_yaml config defaults interpret_value merge paths update",
    "dask.system": "CPU_COUNT cpu_count",
    "dask.utils": "parse_bytes parse_timedelta",
    "distributed.client": "Client _global_clients",
    "distributed.comm": "connect get_address_host get_address_host_port",
    "distributed.comm.addressing": "parse_host_port unparse_host_port",
    "distributed.comm.core": "BaseListener Comm CommClosedError Connector FatalCommClosedError",
    "distributed.comm.registry": "backends",
    "distributed.comm.tcp": "BaseTCPBackend RequireEncryptionMixin _getaddrinfo",
    "distributed.comm.utils": "ensure_concrete_host from_frames to_frames",
    "distributed.compatibility": "asyncio_run",
    "distributed.config": "get_loop_factory",
    "distributed.core": "Status error_message rpc send_recv",
    "distributed.deploy.adaptive_core": "AdaptiveCore",
    "distributed.diskutils": "WorkSpace",
    "distributed.objects": "SchedulerInfo",
    "distributed.protocol": "pickle to_serialize",
    "distributed.protocol.cuda": "cuda_deserialize cuda_serialize",
    "distributed.protocol.serialize": "dask_deserialize dask_serialize",
    "distributed.security": "Security",
    "distributed.spill": "SpillBuffer",
    "distributed.system": "MEMORY_LIMIT",
    "distributed.utils": "NoOpAwaitable ensure_memoryview format_dashboard_link get_ip_interface "
    "import_term nbytes parse_ports",
    "distributed.versions": "get_versions",
}

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
    "cuda_cluster_dask.adaptive.Adaptive": "target workers_to_close",
    "cuda_cluster.comm.Native": "read write close abort closed",
    "cuda_cluster.comm.NativeConnector": "connect",
    "cuda_cluster.comm.NativeListener": "start stop",
    "cuda_cluster.dask.LocalCUDACluster": "_start _close _update_worker_status _repr_html_ close",
}

#: Attributes that instances have: they stand in the source of their classes.
ATTRIBUTES = {
    "distributed.Client": "_instances _handle_report _handle_report_task _close _timeout rpc",
    "distributed.Scheduler": "workers services http_application http_server _ongoing_background_tasks",
    "distributed.Worker": "rpc scheduler contact_address handlers metrics http_application state data "
    "monitor memory_manager",
    "distributed.worker_memory.WorkerMemoryManager": "memory_limit memory_target_fraction "
    "memory_spill_fraction",
    "distributed.core.ConnectionPool": "available occupied",
    "distributed.scheduler.WorkerState": "name server_id nanny pid address",
    "distributed.deploy.Cluster": "scheduler_comm scheduler_info periodic_callbacks "
    "_cluster_manager_logs _loop_runner",
    "distributed.comm.Comm": "handshake_options local_info remote_info",
    "distributed.protocol.serialize.dask_serialize": "_lazy",
}

#: Texts and messages that we send, or tell why a worker closes by; where `distributed` has them.
#: A renamed reason would make a worker that is not wanted any more one that died.
TEXTS = {
    "distributed.scheduler": [
        "scheduler-close",
        "scheduler-close-worker",
        "scheduler-remove-worker",
        "register_nanny",
        "nanny-plugins",
    ],
    "distributed.worker": ["worker-close", "worker-lifetime-reached", "worker-heartbeat-missing"],
    "distributed.nanny": ["plugin_add", "plugin_remove", "kill", "restart"],
}


@pytest.fixture(scope="module", autouse=True)
def our_package():
    """What runs in Dask's processes, under the name that it has there."""
    folder = ROOT / "crates/cluster/src/dask/python"
    spec = importlib.util.spec_from_file_location(
        "cuda_cluster_dask", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == spec.name]:
        del sys.modules[name]


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


@pytest.mark.parametrize("module", IMPORTED)
def test_what_we_import_is_there(module):
    missing = [name for name in IMPORTED[module].split() if not hasattr(named(module), name)]
    assert not missing


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


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_what_we_read_of_an_instance_is_there(path):
    kind = named(path)
    if not inspect.isclass(kind):
        assert all(hasattr(kind, name) for name in ATTRIBUTES[path].split())
        return
    source = "".join(inspect.getsource(one) for one in kind.__mro__[:-1] if "builtins" not in one.__module__)
    missing = [
        name
        for name in ATTRIBUTES[path].split()
        if not hasattr(kind, name) and not re.search(rf"\bself\.{name}\b|^    {name}:", source, re.MULTILINE)
    ]
    assert not missing


@pytest.mark.parametrize("module, text", [(module, text) for module in TEXTS for text in TEXTS[module]])
def test_what_we_send_and_understand_is_said_in_these_words(module, text):
    assert re.search(rf"\b{text}\b", inspect.getsource(named(module)))


@pytest.mark.parametrize("module", ["scheduler", "worker"])
def test_a_dashboard_can_be_connected_later(module):
    pytest.importorskip("bokeh")
    connect = named(f"distributed.dashboard.{module}.connect")
    inspect.signature(connect).bind("application", "http server", "server", prefix="")
