"""`configs/from-dask-cuda.md` and `configs/several-machines.md`: each row of their tables is a test."""

import inspect
import json
import re
import subprocess
import sys

import cuda_cluster
import pytest
from conftest import MACHINE, ROOT
from cuda_cluster import program
from cuda_cluster.dask import LocalCUDACluster, cuda_worker, keywords

GUIDE = (ROOT / "configs/from-dask-cuda.md").read_text()
SEVERAL = (ROOT / "configs/several-machines.md").read_text()


def rows(heading):
    """The rows of the table under a heading, as cells."""
    guide = GUIDE if f"## {heading}\n" in GUIDE else SEVERAL
    text = guide.split(f"# {heading}\n")[1].split("\n## ")[0]
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


#: The rows of all tables, by how they begin, and the tests that show that they are true.
SHOWN_BY = {
    "The class": {
        "the keywords of dask-cuda": "test_wrong_keywords_are_refused_before_anything_starts",
        "": "test_every_keyword_of_the_class_is_known",
        "workers named by their GPUs": "test_workers_are_called_by_the_numbers_of_their_gpus",
        "`cluster.scheduler`": "test_a_scheduler_elsewhere_says_how_it_is_asked",
        "`worker_class=`": "test_classes_and_options_of_the_users_own_reach_the_workers",
        "what workers print": "test_what_workers_print_is_seen_as_with_a_local_cluster",
        "`cluster.scale(n)`, `adapt`": "test_scaling_reaches_the_gpus_that_n_workers_left_out",
        '`memory_limit="auto"`': "test_limits_are_a_workers_share",
        "fewer `n_workers` than GPUs": "test_fewer_workers_are_on_the_best_connected_gpus",
        '`device_memory_limit="1B"`': "test_limits_are_a_workers_share",
        "`LocalCUDACluster()` of a started one": "test_it_is_found_by_its_name_and_left_alone_by_who_only_found_it",
        "an error at the start": "test_what_cannot_start_is_raised_with_its_cause",
    },
    "The commands": {
        "`dask scheduler`": "work_over_tcp_gives_the_numbers_of_numpy_and_pandas_though_a_worker_is_killed",
        "`dask cuda worker tcp": "two_clusters_of_workers_form_one_dask_cluster",
        "`dask cuda worker --scheduler-file": "the_nodes_of_a_slurm_job_form_one_dask_cluster",
        "`dask-ssh`": "test_three_hosts_are_one_cluster_until_it_is_taken_down",
        "both, on all nodes": "test_one_command_for_all_nodes_makes_one_cluster_which_the_first_shows",
        "`dask cuda config": "every_thread_and_variable_of_a_worker_is_as_planned",
        "a shell for the client": "a_plain_client_finds_the_cluster_whose_environment_it_has",
    },
    "Options": {
        "`CUDA_VISIBLE_DEVICES`": "test_workers_are_called_by_the_numbers_of_their_gpus",
        "`--nthreads`": "the_options_of_dask_cuda_arrive",
        "`--name`": "test_the_worker_command_joins_a_scheduler",
        "`--memory-limit auto`": "test_limits_are_a_workers_share",
        "`--device-memory-limit": "test_limits_are_a_workers_share",
        "`--enable-cudf-spill`": "dask_cudas_plugins_are_told_what_was_asked_for",
        "`--rmm-pool-size`": "dask_cudas_plugins_are_told_what_was_asked_for",
        "`--protocol`": "what_dask_cuda_takes_stands_in_the_plan",
        "`--enable-tcp-over-ucx`": "each_of_the_81_combinations_gives_exactly_dask_cudas_environment",
        "`--net-devices`": "a_dgx_1_gives_the_two_gpus_of_a_switch_the_nic_of_that_switch",
        "`--host`": "one_worker_listens_and_is_reached_where_it_was_told_and_the_process_id_is_written",
        "`--port`": "a_busy_port_is_an_error_that_names_its_holder",
        "`--worker-port": "one_worker_listens_and_is_reached_where_it_was_told_and_the_process_id_is_written",
        "`--dashboard`": "dashboards_are_there_when_somebody_opens_them",
        "`--scheduler-file`": "the_nodes_of_a_slurm_job_form_one_dask_cluster",
        "`--tls-ca-file`": "tls_is_spoken_by_all_and_handed_to_clients",
        "none: Dask assumes": "test_random_graphs_with_kills_have_the_results_that_they_have_without_dask",
        "none: `dask.annotate`": "test_gpu_tasks_run_on_gpu_workers_and_others_anywhere",
        "`--local-directory`": "the_options_of_dask_cuda_arrive",
        "`--death-timeout`": "test_a_start_that_fails_leaves_nothing",
        "`--lifetime`": "a_worker_of_age_is_replaced_and_that_is_no_failure",
        "`--pid-file`": "one_worker_listens_and_is_reached_where_it_was_told_and_the_process_id_is_written",
        "`--no-nanny`": "nanny_plugins_and_restarts_work_without_a_nanny",
        "nanny plugins": "nanny_plugins_and_restarts_work_without_a_nanny",
        "`client.run(f, nanny=True)`": "nanny_plugins_and_restarts_work_without_a_nanny",
        "`dask.config`": "test_classes_and_options_of_the_users_own_reach_the_workers",
        "`cluster.adapt(minimum=2)`": "workers_come_with_the_work_and_go_without_it",
        "`cluster.scale(4)`": "fewer_workers_keep_the_data_of_those_that_go",
        "`client.restart()`": "a_clients_restart_brings_all_workers_back_and_a_retired_one_stays_away",
    },
}

SHOWN_BY |= {
    "From one machine to several": {
        "`srun": "test_srun_starts_a_script_whose_body_runs_once_with_the_workers_of_all_nodes",
        "`mpiexec": "test_mpiexec_starts_a_script_likewise",
        "`flux run`": "other_launchers_are_understood",
    },
    "Without a script in the job": {
        "a cluster of all nodes": "test_one_command_for_all_nodes_makes_one_cluster_which_the_first_shows",
        "machines without": "test_a_host_that_is_lost_is_seen_to_be_and_back_when_it_is",
        "jobs that come": "test_whole_machines_come_and_go_with_the_work_and_why_they_end_is_told",
        "dask-jobqueue's own": "test_jobqueue_starts_scales_and_ends_our_workers",
        "dask-mpi": "test_dask_mpis_processes_run_our_workers",
    },
    "How a job ends": {
        "the script ends": "test_the_scripts_failure_is_the_steps",
        "`scancel`": "test_each_end_of_a_job_is_told_as_it_was",
        "the time limit": "test_each_end_of_a_job_is_told_as_it_was",
        "a node fails": "test_each_end_of_a_job_is_told_as_it_was",
    },
}

SOURCES = "".join(
    path.read_text()
    for folder in ("tests", "crates")
    for kind in ("*.py", "*.rs")
    for path in sorted((ROOT / folder).rglob(kind))
)


@pytest.mark.parametrize("table", SHOWN_BY)
def test_each_row_has_a_test(table):
    """The test whose name stands here fails if the row is not true."""
    starts = SHOWN_BY[table]
    for today, *_ in rows(table):
        known = [test for start, test in starts.items() if start and today.startswith(start)]
        if not today:
            known = [starts[""]]
        assert len(known) == 1, f"{today}: {known}"
        assert re.search(rf"(def|fn) {known[0]}\(", SOURCES), f"{today}: there is no {known[0]}"
    assert len(rows(table)) == len(starts), "a test for a row that is not there"


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


def test_workers_are_called_by_their_gpus_where_each_has_its_own():
    called = lambda **asked: keywords.translate(asked).flags.get("worker_names")
    assert called() == called(workers_per_gpu=1) == called(spec={"threads": 2}) == "gpu"
    assert called(worker_names="process", workers_per_gpu=2) == "process"
    for asked in (
        {"workers_per_gpu": 2},
        {"adapt_minimum": 1},
        {"spec": {"workers_per_gpu": 2}},
        {"spec": {"dask": {"adapt_minimum": 1}}},
        {"spec": [{"threads": 1}, {"dask": {"worker_names": "process"}}]},
    ):
        assert called(**asked) is None, asked


def test_keywords_mean_what_they_mean_to_dask():
    flags = lambda **asked: keywords.translate(asked).flags
    for size in (1e9, "1e9", 10**9):
        assert flags(memory_limit=size)["memory_limit"] == 10**9
        assert flags(rmm_pool_size=size)["rmm_pool_size"] == 10**9
    with pytest.warns(DeprecationWarning, match="host"):
        assert flags(ip="0.0.0.0")["host"] == "0.0.0.0"
    assert flags(dashboard=False)["dashboard"] is False
    assert flags(dashboard_address=None)["dashboard"] is False
    with pytest.raises(ValueError, match="two names of one choice"):
        flags(CUDA_VISIBLE_DEVICES="2", gpus="1")
    with pytest.raises(TypeError, match="spec must be a path, a mapping, or a list of them, not 5"):
        flags(spec=5)
    with pytest.raises(TypeError, match="unexpected keyword 'bogus'$"):
        flags(bogus=1)
    joined = cuda_worker.translate({"scheduler": "tcp://127.0.0.1:1", "n_workers": 2})
    assert joined.flags["n_workers"] == 2


def test_false_stands_against_a_spec_that_says_true():
    spec = {"simulate": True, "strict": True, "topology": "l40s-8", "engine": "dask"}
    asked = {"enable_nvlink": True, "spec": spec}
    with pytest.raises(ValueError, match="NVLink"):
        cuda_cluster.plan(**asked)
    plan = cuda_cluster.plan(**asked, strict=False, simulate=False)
    assert plan.json["machine"]["simulated"] is False


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
