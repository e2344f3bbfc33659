"""`configs/from-dask-cuda.md`: each row of its tables is a test."""

import inspect
import json
import re
import subprocess
import sys

import cuda_cluster
import pytest
import test_cluster
from conftest import MACHINE, ROOT
from cuda_cluster import program
from cuda_cluster.dask import LocalCUDACluster, keywords

GUIDE = (ROOT / "configs/from-dask-cuda.md").read_text()


def rows(heading):
    """The rows of the table under a heading, as cells."""
    text = GUIDE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def words(cell, pattern):
    return [one for quoted in re.findall(r"`([^`]*)`", cell) for one in re.findall(pattern, quoted)]


FLAGS = set(re.findall(r"(--[a-z][a-z-]+)", program.run(["up", "--help"])))
#: Rows whose second cell says that there is no such flag here.
ELSEWHERE = {"--name", "--port", "--no-nanny", "--nanny-port", "--preload-nanny", "--scheduler-file",
             "--nthreads", "--disable-"}  # fmt: skip


def schema():
    return json.dumps(json.loads(program.run(["spec", "schema"])))


@pytest.mark.parametrize("row", rows("Options"), ids=lambda row: row[0][:40])
def test_an_option(row):
    today, here, *key = row
    if here.startswith("the same") or "the same" in here[:20]:
        flags = [flag for flag in words(today, r"--[a-z][a-z-]*") if flag not in ELSEWHERE]
        assert set(flags) <= FLAGS, "flags that `up` does not have"
    known = schema()
    for name in words(key[0] if key else "", r"^[a-z_.]+\*?$"):
        last = name.removesuffix(".*").split(".")[-1]
        assert f'"{last}"' in known, f"{name} is no key of a spec"
    flags = words(here, r"--[a-z][a-z-]+")
    missing = {flag for flag in flags if flag not in FLAGS and flag != "--adapt-minimum"}
    assert not missing, "flags that `up` does not have"


@pytest.mark.parametrize("row", rows("The commands"), ids=lambda row: row[0][:40])
def test_a_command(row):
    for command in re.findall(r"`cuda-cluster ([a-z]+)([^`]*)`", row[1]):
        shown = program.run([command[0], "--help"])
        for flag in re.findall(r"--[a-z-]+", command[1]):
            assert flag in shown


#: The rows of the class, and the tests that show them.
CLASS = {
    "the keywords of dask-cuda": "test_wrong_keywords_are_refused_before_anything_starts",
    "": "test_every_keyword_of_the_class_is_known",
    "workers named by their GPUs": "test_workers_are_called_by_the_numbers_of_their_gpus",
    "`cluster.scheduler`": "test_a_scheduler_elsewhere_says_how_it_is_asked",
    "`worker_class=`": "test_classes_and_options_of_the_users_own_reach_the_workers",
    "`cluster.scale(n)`, `adapt`": "test_scaling_hands_data_on_and_knows_its_limits",
    '`memory_limit="auto"`': "test_limits_are_a_workers_share",
    "fewer `n_workers` than GPUs": "test_fewer_workers_are_on_the_best_connected_gpus",
    '`device_memory_limit="1B"`': "test_limits_are_a_workers_share",
    "`LocalCUDACluster()` of a started one": "test_it_is_found_by_its_name_and_left_alone_by_who_only_found_it",
    "an error at the start": "test_what_cannot_start_is_raised_with_its_cause",
}


@pytest.mark.parametrize("row", rows("The class"), ids=lambda row: row[0][:40])
def test_a_row_of_the_class_has_a_test(row):
    named = [test for start, test in CLASS.items() if row[0].startswith(start) and start]
    [test] = named or [CLASS[""]]
    sources = [inspect.getsource(test_cluster), inspect.getsource(sys.modules[__name__])]
    assert any(f"def {test}(" in source for source in sources)


def test_every_keyword_of_the_class_is_known():
    """All keywords of dask-cuda's class, of LocalCluster and of Worker are taken or refused."""
    from distributed import LocalCluster, Worker

    upstream = set(keywords.DASK_CUDA)
    try:
        import dask_cuda

        upstream |= set(inspect.signature(dask_cuda.LocalCUDACluster.__init__).parameters)
    except ImportError:
        pass
    for kind in (LocalCluster, Worker):
        upstream |= set(inspect.signature(kind.__init__).parameters)
    own = set(inspect.signature(LocalCUDACluster.__init__).parameters)
    # What a nanny gives, and what the class has under another name.
    upstream -= {"self", "kwargs", "worker_kwargs", "scheduler_ip", "nthreads"}
    for name in sorted(upstream - own):
        try:
            keywords.translate({name: None})
        except TypeError as error:
            pytest.fail(f"{name}: {error}")


def test_limits_are_a_workers_share():
    plan = cuda_cluster.plan(topology="dgx-a100", engine="dask")
    node = cuda_cluster.topology("dgx-a100").numa[plan.workers[0].gpu.index]
    assert 0 < plan.workers[0].memory_limit_bytes <= node.memory_bytes
    assert plan.workers[0].device_memory_limit_bytes == int(0.8 * 80 * 2**30)
    with pytest.raises(ValueError, match="64KiB"):
        LocalCUDACluster(**MACHINE, device_memory_limit="1B")
    for none in (None, 0, "auto"):
        assert keywords.translate({"device_memory_limit": none}).flags["device_memory_limit"] == "none"
    assert keywords.translate({"device_memory_limit": "default"}).flags["device_memory_limit"] == "auto"


def test_fewer_workers_are_on_the_best_connected_gpus():
    plan = cuda_cluster.plan(topology="dgx-1-v100", engine="dask", n_workers=4, enable_nvlink=True)
    chosen = {worker.gpu.index for worker in plan.workers}
    links = cuda_cluster.topology("dgx-1-v100").links
    kinds = [one.kind for one in links
             if {one.a, one.b} <= {f"GPU{index}" for index in chosen}]  # fmt: skip
    assert kinds and all(kind.startswith("NV") for kind in kinds)


def test_the_one_line_of_the_guide_imports():
    [line] = re.findall(r"^(from cuda_cluster\.dask import \w+)", GUIDE, re.MULTILINE)
    assert GUIDE.index(line) < 200, "the guide begins with it"
    subprocess.run([sys.executable, "-c", line], check=True)
