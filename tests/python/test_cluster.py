"""`LocalCUDACluster` as an object: what it has, how it starts, scales and ends."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
import warnings

import cloudpickle
import cuda_cluster
import dask
import distributed
import pytest
from conftest import MACHINE, QUIET, eventually
from cuda_cluster import program
from cuda_cluster.dask import LocalCUDACluster
from cuda_cluster.dask import client as client_module
from distributed import Client, Nanny, Worker, get_client
from distributed.core import Status
from distributed.deploy import Cluster
from distributed.security import Security
from known import workers_of


@pytest.fixture(scope="module")
def cluster():
    with LocalCUDACluster(**MACHINE, n_workers=3, name="shown", dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        yield client


def test_it_is_a_cluster_with_what_clusters_have(cluster, client):
    assert isinstance(cluster, Cluster) and cluster.status == Status.running
    assert cluster.name == "shown" and cluster.scheduler_address.startswith("direct://127.0.0.1:")
    assert cluster.dashboard_link.endswith("/status")
    assert len(cluster.scheduler_info["workers"]) == 3
    assert workers_of(client).keys() == cluster.scheduler_info["workers"].keys()
    assert repr(cluster).startswith("LocalCUDACluster(shown, 'direct://127.0.0.1:")
    assert cluster.get_client() is client
    assert client.cluster is cluster


def test_workers_are_called_by_the_numbers_of_their_gpus(cluster, client):
    assert list(cluster.workers) == [0, 1, 2] and cluster.cuda_visible_devices == list(range(8))
    assert cluster.plan == cluster.requested == cluster.observed == {0, 1, 2}
    visible = client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    for address, devices in visible.items():
        name = cluster.scheduler.workers[address].name
        assert name == int(devices.split(",")[0])
        assert cluster.workers[name].address == address
        assert cluster.workers[name].process == f"gpu{name}"
    worker = cluster.workers[1]
    assert (worker.nthreads, worker.status) == (1, Status.running)
    # `distributed` cuts it down to what this machine has.
    planned = cluster.worker_spec[1]["options"]["memory_limit"]
    assert 0 < worker.memory_manager.memory_limit <= planned


def test_a_scheduler_elsewhere_says_how_it_is_asked(cluster):
    assert cluster.scheduler.address == cluster.scheduler_address
    with pytest.raises(AttributeError, match="run_on_scheduler"):
        _ = cluster.scheduler.tasks


def test_logs_are_those_of_scheduler_and_workers(cluster):
    logs = cluster.get_logs()
    assert {"Cluster", "Scheduler"} < logs.keys() and len(logs) == 5
    assert "simulation" in logs["Cluster"]
    assert set(cluster.get_logs(cluster=False, scheduler=False)) == set(cluster.scheduler.workers)
    assert cuda_cluster.attach("shown").logs("gpu1")


def test_a_notebook_shows_it_with_a_picture_of_the_machine(cluster):
    text = cluster._repr_html_()
    assert "shown" in text and "<svg" in text and "GPU0" in text
    # It shows how the workers are now.
    assert "3 of 3 workers READY" in text and text.count(", READY</title>") == 3

    def its_end_is_shown():
        # It is back in a moment, but each time after a longer one.
        worker = cuda_cluster.attach("shown").state().workers[1]
        if worker.state == "ready":
            os.kill(worker.pid, signal.SIGKILL)
        return "2 of 3 workers READY; gpu1 " in cluster._repr_html_()

    eventually(its_end_is_shown, "its end is shown")
    eventually(lambda: "3 of 3 workers READY" in cluster._repr_html_(), "it is back")


def test_a_notebook_does_not_show_workers_as_ready_whose_supervisor_has_died():
    with LocalCUDACluster(n_workers=1, name="orphaned", **MACHINE) as cluster:
        assert ", READY</title>" in cluster._repr_html_()
        kept = cluster.run_directory
        os.kill(cuda_cluster.attach("orphaned").state().json["supervisor_pid"], signal.SIGKILL)
        eventually(lambda: "no worker runs" in cluster._repr_html_(), "its end is shown")
        assert ", READY</title>" not in cluster._repr_html_()
    # What is known of such an end is kept, and not needed here.
    shutil.rmtree(kept)


@pytest.mark.parametrize("wanted", [True, False])
def test_what_this_program_has_loaded_is_loaded_by_the_scheduler_meanwhile(wanted):
    import dask.bag  # noqa: F401

    def loaded():
        return "dask.bag" in sys.modules

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = {} if wanted else {"cuda-cluster.imports": []}
    with (
        dask.config.set(config),
        LocalCUDACluster(**MACHINE, n_workers=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        if wanted:
            eventually(lambda: client.run_on_scheduler(loaded), "it is loaded")
        assert client.run_on_scheduler(loaded) == wanted
        assert not any(client.run(loaded).values())


@pytest.mark.parametrize("wrong", [5, "numpy", [5]])
def test_what_is_no_list_of_modules_is_told(wrong):
    with dask.config.set({"cuda-cluster.imports": wrong}), pytest.raises(Exception, match="'cuda-cluster.imports' must be"):
        LocalCUDACluster(**QUIET, n_workers=1)


def test_no_depth_of_calls_is_slow_for_want_of_room(cluster, client):
    def leaf():
        pass

    def faults():
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def at(depth):
        """Pages that a thousand calls at this depth are given."""
        if depth:
            return at(depth - 1)
        before = faults()
        for _ in range(1000):
            leaf()
        return faults() - before

    def worst():
        return max(map(at, range(500)))

    # Without it, frames lie in pieces of 16 KiB, of which one is taken and given back by each call. Python 3.10
    # has no such pieces; 3.12 and 3.14 of Ubuntu, and 3.14 and 3.15 of Debian, do not show it.
    assert sys.version_info[:2] not in {(3, 11), (3, 13)} or worst() >= 1000
    assert all(pages < 100 for pages in client.run(worst).values())
    assert client.run_on_scheduler(worst) < 100


def test_it_is_found_by_its_name_and_left_alone_by_who_only_found_it(cluster):
    with LocalCUDACluster.from_name("shown") as found:
        assert found.scheduler_address == cluster.scheduler_address
        assert list(found.workers) == [0, 1, 2] and len(found.scheduler.workers) == 3
        with Client(found) as client:
            assert client.submit(sum, [1, 2]).result() == 3
    assert cluster.status == Status.running
    with Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result() == 3


def test_scaling_hands_data_on_and_knows_its_limits(cluster, client):
    data = client.scatter(list(range(12)), broadcast=False)
    cluster.scale(1)
    eventually(lambda: cluster.observed == {0}, "one worker")
    assert client.gather(data) == list(range(12))
    cluster.scale(3)
    eventually(lambda: cluster.observed == {0, 1, 2}, "the same ones are back")
    with pytest.raises(ValueError, match="Can not scale beyond visible devices"):
        cluster.scale(1000)
    with pytest.raises(ValueError, match="n must not be negative: -1"):
        cluster.scale(-1)
    cluster.scale(cores=2)
    eventually(lambda: cluster.observed == {0, 1}, "two cores")
    cluster.scale(3)
    client.wait_for_workers(3, timeout=120)


def test_scaling_reaches_the_gpus_that_n_workers_left_out(cluster, client):
    cluster.scale(5)
    client.wait_for_workers(5, timeout=120)
    assert cluster.observed == set(cluster.workers) == {0, 1, 2, 3, 4}
    last = cluster.workers[4]
    address = last.address
    visible = client.run(os.getenv, "CUDA_VISIBLE_DEVICES", workers=[address])[address]
    assert visible.split(",")[0] == "4" and len(visible.split(",")) == 8
    # What was asked for last counts, however soon after the other.
    cluster.scale(1)
    cluster.scale(4)
    eventually(lambda: cluster.observed == set(cluster.workers) and len(cluster.workers) == 4, "four")
    assert last.address is None, "nobody is there"
    assert client.submit(sum, [1, 2]).result() == 3
    with LocalCUDACluster.from_name("shown") as found:
        assert found.observed == set(found.workers) == cluster.observed
        found.scale(6)
        client.wait_for_workers(6, timeout=120)
    cluster.scale(6)
    cluster.scale(3)
    eventually(lambda: cluster.observed == set(cluster.workers) and len(cluster.workers) == 3, "three")


def test_it_adapts_to_the_work(cluster, client):
    adaptive = cluster.adapt(minimum=0, maximum=5, interval="200ms", wait_count=5)
    try:
        eventually(lambda: not cluster.observed, "no worker")
        slow = client.map(lambda n: time.sleep(0.1) or n, range(300), pure=False)
        eventually(lambda: len(cluster.observed) == 5, "as many as it may have")
        assert sum(client.gather(slow)) == sum(range(300))
        eventually(lambda: len(cluster.observed) <= 1, "results keep one")
        assert sum(client.gather(slow)) == sum(range(300))
    finally:
        adaptive.stop()
        cluster.scale(3)
    client.wait_for_workers(3, timeout=120)
    with pytest.raises(ValueError):
        cluster.scale(9)


def test_a_worker_that_dies_is_back_under_its_name(cluster, client):
    before = cluster.workers[1].address
    pid = client.run(os.getpid, workers=[before])[before]
    os.kill(pid, 9)
    eventually(lambda: cluster.workers[1].address != before, "it is back")
    eventually(lambda: cluster.workers[1].status == Status.running, "and runs")


class Doubling(Worker):
    """A class of a user's own, which workers cannot import."""

    def double(self, number):
        return 2 * number


# As if it were of a notebook.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.usefixtures("nothing_is_left")
class TestStarts:
    def test_what_cannot_start_is_raised_with_its_cause(self):
        with pytest.raises(cuda_cluster.ClusterError, match="No module named 'no_such_module'"):
            LocalCUDACluster(**QUIET, n_workers=1, pre_import="no_such_module")
        with pytest.raises(cuda_cluster.ClusterError, match="no_such.Class|no_such"):
            LocalCUDACluster(**QUIET, n_workers=1, worker_class="no_such.Class")

    def test_nvlink_that_is_not_there_is_an_error_where_that_is_asked_for(self):
        kwargs = {**QUIET, "topology": "l40s-8", "strict": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="NVLink"):
                LocalCUDACluster(**kwargs, enable_nvlink=True)

    def test_a_start_that_is_cancelled_leaves_nothing(self):
        async def story():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(start(), 0.3)

        async def start():
            return await LocalCUDACluster(**QUIET, n_workers=2, asynchronous=True)

        asyncio.run(story())
        # The fixture sees whether anything is left.

    def test_tls_with_certificates_that_are_only_in_memory(self):
        security = Security.temporary()
        with LocalCUDACluster(**QUIET, n_workers=2, security=security) as cluster:
            assert cluster.scheduler_address.startswith("tls://")
            with Client(cluster) as client:
                assert client.submit(sum, [1, 2]).result() == 3
            with LocalCUDACluster.from_name(cluster.name) as found, Client(found) as client:
                assert client.submit(sum, [1, 2]).result() == 3
        with LocalCUDACluster(**QUIET, n_workers=1, security=True) as cluster, Client(cluster):
            pass

    def test_settings_of_any_size_reach_every_process_and_no_command_line_has_them(self):
        secret, large = "hunter2-of-this-test", "x" * 300_000
        look = lambda: (
            dask.config.get("gateway.auth"),
            dask.config.get("a.size", ""),
            subprocess.run("env", capture_output=True, text=True, check=True).stdout,
        )
        config = {"a.size": large}
        with (
            dask.config.set({"gateway.auth": {"password": secret}}),
            LocalCUDACluster(**QUIET, n_workers=2, config=config) as cluster,
            Client(cluster) as client,
        ):
            client.wait_for_workers(2, timeout=60)
            for auth, size, environment in [*client.run(look).values(), client.run_on_scheduler(look)]:
                assert (auth, size) == ({"password": secret}, large)
                assert secret not in environment
            seen = subprocess.run(["ps", "axww", "-o", "args="], capture_output=True, text=True).stdout
            assert str(cluster.run_directory) in seen
            assert secret not in seen and large not in seen

    def test_a_child_that_ends_leaves_the_clusters_of_its_parent_alone(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(
                f"""
                import os, sys
                from cuda_cluster.dask import LocalCUDACluster
                from distributed import Client
                if __name__ == "__main__":
                    cluster = LocalCUDACluster(**{QUIET!r}, n_workers=2, security=True)
                    child = os.fork()
                    if child == 0:
                        sys.exit(0)
                    assert os.waitpid(child, 0)[1] == 0
                    # New workers need the certificates, too.
                    cluster.scale(3)
                    with Client(cluster) as client:
                        client.wait_for_workers(3, timeout=60)
                        print(len(client.run(os.getpid)))
                    cluster.close()
                """
            )
        )
        ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
        assert (ended.returncode, ended.stdout) == (0, "3\n"), ended.stderr

    def test_a_worker_that_the_scheduler_does_not_retire_stays_and_later_scaling_works(self):
        with LocalCUDACluster(**QUIET, n_workers=2) as cluster, Client(cluster) as client:
            there = lambda: len(workers_of(client))
            data = client.scatter(5)
            cluster.scale(0)
            eventually(lambda: there() == len(cluster.workers) == 1, "one keeps the data", 60)
            cluster.scale(2)
            eventually(lambda: there() == len(cluster.workers) == 2, "another one comes", 60)
            assert data.result() == 5
            del data
            cluster.scale(0)
            eventually(lambda: there() == len(cluster.workers) == 0, "nothing keeps them", 60)

    def test_a_cluster_that_was_found_is_closed_when_it_has_ended(self):
        with LocalCUDACluster(**QUIET, n_workers=1) as cluster:
            found = LocalCUDACluster.from_name(cluster.name)
            assert found.status.name == "running"
        eventually(lambda: found.status.name == "closed", "it is told", 60)
        found.close()

    def test_ucx_between_workers_and_with_the_client(self, tmp_path):
        # In a Python of its own, because UCX is set up once in a process.
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(
                f"""
                import numpy as np, os
                from cuda_cluster.dask import LocalCUDACluster
                from distributed import Client
                if __name__ == "__main__":
                    kwargs = dict(protocol="ucxx", enable_nvlink=True, rmm_pool_size=0.1, verify=True)
                    with LocalCUDACluster(**{QUIET!r}, n_workers=2, **kwargs) as cluster:
                        with Client(cluster) as client:
                            a = client.submit(np.ones, 1 << 20, workers=[cluster.workers[0].address])
                            b = client.submit(np.sum, a, workers=[cluster.workers[1].address])
                            print(cluster.scheduler_address[:4], b.result(), os.environ["UCX_TLS"])
                """
            )
        )
        pytest.importorskip("distributed_ucxx")
        # Another test may have set up UCX in this process.
        own = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=own)
        # UCX's own lines, of connections that are tried again, may come before and after it.
        [said] = [line for line in done.stdout.splitlines() if line.startswith("ucxx ")] or [""]
        assert said.startswith("ucxx 1048576.0") and "posix" in said, done.stderr + done.stdout

    def test_classes_and_options_of_the_users_own_reach_the_workers(self):
        kwargs = {"env": {"ANSWER": 42}, "config": {"distributed": {"worker": {"use-file-locking": False}}},
                  "resources": {"GPU": 2}, "lifetime_stagger": "2s"}  # fmt: skip
        with LocalCUDACluster(**QUIET, n_workers=1, worker_class=Doubling, data=dict, **kwargs) as cluster:
            with Client(cluster) as client:
                inside = lambda dask_worker: (
                    type(dask_worker).__name__,
                    type(dask_worker.data).__name__,
                    dask_worker.double(2),
                    os.environ["ANSWER"],
                    __import__("dask").config.get("distributed.worker.use-file-locking"),
                    dict(dask_worker.state.total_resources),
                )
                inside = client.run(inside)
                assert list(inside.values()) == [("Doubling", "dict", 4, "42", False, {"GPU": 2})]

    def test_workers_import_what_the_script_can(self, tmp_path, monkeypatch):
        (tmp_path / "beside_the_script.py").write_text("value = 7\n")
        monkeypatch.syspath_prepend(str(tmp_path))

        def inside():
            import beside_the_script

            return beside_the_script.value

        with LocalCUDACluster(**QUIET, n_workers=1) as cluster, Client(cluster) as client:
            assert set(client.run(inside).values()) == {7}
            assert client.run_on_scheduler(inside) == 7

    def test_a_nannys_class_is_its_workers(self):
        with LocalCUDACluster(**QUIET, n_workers=1, worker_class="distributed.Nanny") as cluster:
            assert len(cluster.workers) == 1

        class Patient(Nanny):
            pass

        with LocalCUDACluster(**QUIET, n_workers=1, worker_class=Patient) as cluster:
            assert len(cluster.workers) == 1

    def test_a_spec_beside_the_keywords(self, tmp_path):
        spec = tmp_path / "spec.yaml"
        spec.write_text("version: 1\nworkers: 2\nthreads: 5\n")
        with LocalCUDACluster(**QUIET, spec=spec, threads_per_worker=2, env={"A": "1"}) as cluster:
            assert [worker.nthreads for worker in cluster.workers.values()] == [2, 2]

    def test_what_a_spec_says_is_not_undone_by_usual_values(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PLACE", "scratch")
        spec = tmp_path / "spec.yaml"
        spec.write_text(
            "version: 1\nname: of-the-file\nworkers: 2\nthreads: 5\nmemory: {limit: 1GB}\n"
            "dask: {protocol: tcp, worker_names: process}\n"
            "worker: {env: {A: 1.10, B: '${PLACE}'}, local_directory: '${PLACE}'}\n"
        )

        def inside(dask_worker):
            limit = dask_worker.memory_manager.memory_limit
            return [*map(os.environ.get, "AB"), limit, dask_worker.local_directory]

        kwargs = {**QUIET, "spec": spec, "env": {"C": "3"}}
        with LocalCUDACluster(**kwargs) as cluster, Client(cluster) as client:
            assert (cluster.name, list(cluster.workers)) == ("of-the-file", ["gpu0", "gpu1"])
            assert cluster.scheduler_address.startswith("tcp://")
            assert {worker.nthreads for worker in cluster.workers.values()} == {5}
            for *values, place in client.run(inside).values():
                assert values == ["1.10", "scratch", 10**9]
                assert place.startswith(f"{tmp_path}/scratch/")

    def test_what_is_wrong_in_a_spec_file_is_named_by_its_line(self, tmp_path):
        spec = tmp_path / "spec.yaml"
        spec.write_text("version: 1\nthread: 5\n")
        with pytest.raises(ValueError, match=r"spec\.yaml:2:1: thread: unknown key"):
            LocalCUDACluster(**QUIET, spec=spec)

    def test_what_the_script_has_set_in_dasks_configuration_is_that_of_all_processes(self):
        mine = {
            "distributed.worker.memory.target": 0.41,
            "my.list": ["a", 1, None],
            "my.text": "5",
            "my.word": "cudf",
            "distributed.comm.timeouts.connect": "17s",
        }

        def inside():
            import dask

            return {name: dask.config.get(name) for name in mine}

        with dask.config.set(mine):
            config = {"distributed.comm.timeouts.connect": "19s"}
            with LocalCUDACluster(**QUIET, n_workers=1, config=config) as cluster:
                with Client(cluster) as client:
                    wanted = mine | config
                    assert list(client.run(inside).values()) == [wanted]
                    assert client.run_on_scheduler(inside) == wanted

    def test_a_dashboard_that_is_not_wanted_is_not_served(self):
        with LocalCUDACluster(**MACHINE, n_workers=1, dashboard=False) as cluster:
            with Client(cluster) as client:
                port = client.run_on_scheduler(
                    lambda dask_scheduler: dask_scheduler.services["dashboard"].port
                )
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/status")

    def test_that_spilling_cannot_be_logged_is_said_and_does_no_harm(self):
        with pytest.warns(UserWarning, match="'log_spilling' has no effect"):
            cluster = LocalCUDACluster(**QUIET, n_workers=1, log_spilling=True)
        with cluster, Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3

    def test_the_variables_of_one_clusters_clients_are_not_a_wish_for_the_next(self, monkeypatch):
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            monkeypatch.delenv(name)
        chosen = lambda: cuda_cluster.plan(topology="dgx-a100", enable_nvlink=True).json["client_env"]
        before = chosen()
        wanted = {"UCX_TLS": "tcp,self", "UCX_RNDV_THRESH": "1"}
        try:
            client_module.configure_ucx(wanted, context=False)
            assert os.environ["UCX_TLS"] == "tcp,self"
            assert chosen() == before
            # What the user sets afterwards is the user's.
            monkeypatch.setenv("UCX_RNDV_THRESH", "2")
            assert program.environment()["UCX_RNDV_THRESH"] == "2"
        finally:
            for name in wanted:
                os.environ.pop(name, None)

    @pytest.mark.parametrize("host", ["::1", "[::1]"])
    def test_a_host_can_be_an_ipv6_address(self, host):
        place = {"host": host, "dashboard_address": "[::1]:0"}
        if tuple(map(int, distributed.__version__.split(".")[:2])) < (2025, 11):
            with pytest.raises(cuda_cluster.ClusterError, match="IPv6 needs Dask 2025.11 or newer"):
                LocalCUDACluster(**{**QUIET, **place}, n_workers=1)
            return
        with (
            LocalCUDACluster(**{**QUIET, **place}, n_workers=1) as cluster,
            Client(cluster) as client,
        ):
            assert "//[::1]:" in cluster.scheduler_address
            assert client.submit(sum, [1, 2]).result() == 3

    def test_from_a_worker_a_client_is_found(self):
        def inside():
            return get_client().submit(sum, [1, 2]).result()

        with LocalCUDACluster(**QUIET, n_workers=2) as cluster, Client(cluster) as client:
            assert client.submit(inside).result() == 3


@pytest.mark.parametrize(
    "kwargs, error, words",
    [
        ({"threads_per_worker": 0}, ValueError, "threads_per_worker must be higher than 0"),
        ({"n_workers": 0}, ValueError, "cannot be less than 1"),
        ({"n_workers": "two"}, TypeError, "n_workers must be a whole number, not 'two'"),
        ({"threads_per_worker": "x"}, TypeError, "threads_per_worker must be a whole number, not 'x'"),
        ({"memory_limit": "5 bananas"}, ValueError, r"^memory_limit='5bananas': (?!.*--help)"),
        ({"protocol": "tcp", "enable_nvlink": True}, TypeError, "requires protocol='ucx'"),
        ({"processes": False}, ValueError, "Processes are necessary"),
        ({"rmm_allocator_external_lib_list": 3}, ValueError, "comma-separated string"),
        ({"log_spilling": True, "worker_class": Worker}, ValueError, "log_spilling"),
        ({"n_worker": 2}, TypeError, "did you mean 'n_workers'"),
        ({"scheduler_kwargs": {"a": 1}}, ValueError, "a process of its own"),
        ({"preload_nanny": ["a"]}, ValueError, "no nannies"),
        ({"security": "no"}, TypeError, "Security object"),
        ({"rmm_managed_memory": True, "enable_nvlink": True}, ValueError, "--rmm-managed-memory"),
        ({"rmm_release_threshold": "1GB"}, ValueError, "--rmm-release-threshold"),
        ({"CUDA_VISIBLE_DEVICES": "0,99"}, ValueError, "99"),
        ({"topology": "nowhere"}, ValueError, "nowhere"),
    ],
)
def test_wrong_keywords_are_refused_before_anything_starts(kwargs, error, words):
    with pytest.raises(error, match=words):
        LocalCUDACluster(**{**QUIET, **kwargs})


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_scaling_a_cluster_that_ends_raises_nothing_in_the_background(end, caplog, capfd):
    cluster = LocalCUDACluster(**MACHINE, n_workers=2, protocol="tcp")
    with cluster:
        cluster.scale(1)
        if end == "killed":
            os.kill(cluster._attached.state().supervisor_pid, 9)
            cluster.scale(2)
            eventually(lambda: cluster.status == Status.closed, "its end is noticed")
    assert cluster.workers == {} and len(cluster.scheduler_info["workers"]) == 0
    assert "workers=0" in repr(cluster)
    assert "Traceback" not in caplog.text + capfd.readouterr().err
