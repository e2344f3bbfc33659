"""A pytest plugin for dask-cuda's own tests, run over our class: which of them cannot pass, and why.

Two reasons there are: a GPU, which the made-up machine is not, and a design of ours, which
`configs/from-dask-cuda.md` tells. Whatever else fails is a fault.
"""

import pytest

GPU = "needs a GPU: RMM allocates on the device"
CONTEXT = "needs a GPU: looks at devices and contexts through cuda.core"
LEAST = "a design of ours: a device memory limit below 64 KiB is refused as a slip"
NO_NANNY = "a design of ours: the supervisor is the nanny of all workers, and a failure ends with 1"
PRELOAD = "a design of ours: workers have their CUDA context before Dask's preloads, so none is loaded"

#: Tests of the class and of the command line alike.
MEMORY = dict.fromkeys(
    (
        "test_rmm_pool",
        "test_rmm_managed",
        "test_rmm_async",
        "test_rmm_async_with_maximum_pool_size",
        "test_rmm_logging",
        "test_rmm_track_allocations",
        "test_get_cluster_configuration",
        "test_worker_fraction_limits",
    ),
    GPU,
)

EXPECTED = {
    "test_local_cuda_cluster.py": {
        **MEMORY,
        "test_rmm_pool_size_warns": GPU,
        "test_print_cluster_config[1B]": LEAST,
    },
    "test_dask_setup.py": {
        f"test_dask_cuda_worker_cli_integration[{protocol}]": PRELOAD for protocol in ("tcp", "ucx", "ucxx")
    },
    "test_initialize.py": {
        f"test_cuda_context_warning_with_subprocess_warnings[{protocol}]": CONTEXT
        for protocol in ("tcp", "ucx")
    },
    "test_utils.py": {"test_get_device_total_memory": CONTEXT},
    "test_dask_cuda_worker.py": {
        **MEMORY,
        "test_worker_timeout": NO_NANNY,
    },
}

#: Where a little is enough: what a cluster, its workers and the command line are.
SHORT = (
    "test_local_cuda_cluster.py::test_local_cuda_cluster",
    "test_local_cuda_cluster.py::test_with_subset_of_cuda_visible_devices",
    "test_local_cuda_cluster.py::test_ucx_protocol",
    "test_local_cuda_cluster.py::test_n_workers",
    "test_local_cuda_cluster.py::test_no_memory_limits_cudaworker",
    "test_local_cuda_cluster.py::test_gpu_uuid",
    "test_local_cuda_cluster.py::test_cuda_worker_",
    "test_dask_cuda_worker.py::test_cuda_visible_devices",
    "test_dask_cuda_worker.py::test_unknown_argument",
    "test_dask_cuda_worker.py::test_pre_import_not_found",
    "test_worker_spec.py::test_worker_spec[True-True-False-1-None-ucx",
    "test_version.py",
)


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="a little of everything")


def pytest_collection_modifyitems(config, items):
    for item in items:
        file = item.path.name
        reason = EXPECTED.get(file, {}).get(item.name)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, run=False))
    if config.getoption("--short"):
        chosen = [item for item in items if f"{item.path.name}::{item.name}".startswith(SHORT)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
