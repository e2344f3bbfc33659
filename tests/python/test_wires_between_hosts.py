"""Wires between the hosts of one Dask cluster: what `verify` observes of them, what it does not, and hosts
that differ. The hosts are networks of this machine, some with processes, /dev/shm and clocks of their own."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import cuda_cluster
import pytest
from conftest import BUILT, ROOT, RUNTIME
from distributed import Client
from hosts import OF_ITS_OWN, another_host, namespaces, needs_network
from test_join import MACHINE, asked, until

pytestmark = [needs_network, pytest.mark.usefixtures("nothing_is_left")]

SECRET = "DASK_DISTRIBUTED__COMM__DIRECT__SECRET_FILE"
OLDEST = ROOT / ".venv-oldest/bin/python"


def scheduler_of(name):
    return json.loads(asked("ps", name, "-o", "json").stdout)["scheduler"]["address"]


@contextlib.contextmanager
def cluster(*flags, env=(), machine=MACHINE):
    """A cluster here; its name."""
    name = f"home-{os.getpid()}"
    command = [str(BUILT), "up", "--detach", "--name", name, *machine, *flags]
    env = {**os.environ, **dict(env)}
    try:
        up = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
        assert up.returncode == 0, up.stderr
        yield name
    finally:
        asked("down", name)
        shutil.rmtree(f"{RUNTIME}/cuda-cluster/{name}", ignore_errors=True)


class Guest:
    """What `up --join` says, and how it ends."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self.reader = threading.Thread(target=lambda: self.lines.extend(process.stdout))
        self.reader.start()

    @property
    def output(self):
        return "".join(self.lines)

    def ended(self):
        code = self.process.wait(120)
        self.reader.join()
        return code


@contextlib.contextmanager
def joined(home, host, *flags, env=(), machine=MACHINE, join=None):
    """A cluster there that joins the one here; once its workers are known here, unless it ends."""
    name = f"guests-{os.getpid()}"
    command = [str(BUILT), "up", "--name", name, *machine, "--gpus", "0-1", "--ready-within", "5m"]
    command += ["--join", join or scheduler_of(home), *flags]
    process = subprocess.Popen(
        host.command(*command),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **dict(env)},
    )  # fmt: skip
    guest = Guest(process)

    def here():
        known = cuda_cluster.attach(home).state().joined
        return process.poll() is not None or sum(one.state == "ready" for one in known) == 2

    try:
        until(here)
        yield guest
    finally:
        # Not by a signal, which nsenter would keep.
        subprocess.run(host.command(str(BUILT), "down", name), capture_output=True, check=False)
        assert guest.ended() is not None
        shutil.rmtree(f"{RUNTIME}/cuda-cluster/{name}", ignore_errors=True)


def verified(name, *flags):
    """The exit code of `verify`, and what it has found between hosts."""
    said = asked("verify", name, "-o", "json", "--budget", "100ms", *flags)
    assert said.returncode in (0, 4), said.stderr
    return said.returncode, json.loads(said.stdout)["between_hosts"]


def test_pairs_of_two_hosts_are_a_sample_that_is_said_or_all_and_strangers_are_not_measured():
    with another_host() as host, cluster("--gpus", "0-1", "--host", host.here) as home:
        with joined(home, host, "--host", host.there):
            code, found = verified(home)
            assert (code, found["pairs"], found["chosen"], found["is_sample"]) == (0, 8, 2, True)
            assert [host.here in found["hosts"][0], host.there in found["hosts"][1]] == [True, True], found
            for row in found["measured"]:
                assert (row["lanes"], row["expected"], row["verdict"]) == (["tcp"], "tcp", "ok")
                assert row["moved_bytes"] >= 2 * row["compared_bytes"] == 2 * (16 << 20)
                assert row["gb_per_s"] > 0 and row["from_host"] != row["to_host"]
            code, found = verified(home, "--all")
            assert (code, len(found["measured"]), found["is_sample"]) == (0, 8, False)
            assert len({(row["from"], row["to"]) for row in found["measured"]}) == 8
            said = "between 2 hosts: 2 of 8 pairs, each host with each other and each NIC once: 2 of 2 ok"
            assert said in asked("verify", home, "--budget", "100ms").stdout
            far = min({row["to"] for row in found["measured"]} - {"gpu0", "gpu1"})
            code, found = verified(home, "--to", far)
            assert (code, {row["to"] for row in found["measured"]}, len(found["measured"])) == (0, {far}, 2)
            there = asked("verify", f"guests-{os.getpid()}", "--budget", "100ms")
            assert there.returncode == 0 and "2 of 2 ok" in there.stdout, there
            assert f"verified where the scheduler is ({scheduler_of(home)})" in there.stderr
            # One of Dask's own workers answers no questions: that is said, and no success.
            command = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler_of(home)]
            command += ["--host", host.there, "--name", "stranger", "--no-dashboard", "--no-nanny"]
            stranger = subprocess.Popen(host.command(*command), stderr=subprocess.DEVNULL)
            try:
                until(lambda: len(cuda_cluster.attach(home).state().joined) == 3)
                code, found = verified(home, "--all")
                told = [one["verdict"] for one in found["measured"] if "stranger" in (one["from"], one["to"])]
                assert code == 4 and len(told) > 2 and all("not measured: " in one for one in told), told
                assert any("it is no worker of cuda-cluster's" in one for one in told), told
                others = [one for one in found["measured"] if "stranger" not in (one["from"], one["to"])]
                assert {one["verdict"] for one in others} == {"ok"}
            finally:
                stranger.terminate()
                stranger.wait(60)
            until(lambda: [one.state for one in cuda_cluster.attach(home).state().joined].count("ready") == 2)


def machine_with_nics(folder, name, **renamed):
    """Flags and variables for a simulated DGX H100 whose NICs the system shows."""
    source = (ROOT / "topologies/dgx-h100.yaml").read_text()
    source = re.sub(r"mlx5_\d+", lambda nic: renamed.get(nic[0], nic[0]), source)
    file = folder / f"{name}.yaml"
    file.write_text(source)
    tool = BUILT.parent / "examples/fake-machine"
    made = subprocess.run([tool, file, folder / name], capture_output=True, text=True, check=True).stdout
    variables = dict(line.split("=", 1) for line in made.splitlines())
    flags = ["--simulate", "--topology", str(file), *MACHINE[3:]]
    wanted = ["--protocol", "direct", "--enable-infiniband", "--net-devices", "auto"]
    return [*flags, *wanted], {"CUDA_CLUSTER_SYSFS": variables["CUDA_CLUSTER_SYSFS"]}


def test_bytes_that_miss_the_planned_nics_are_below_plan_and_rails_that_differ_are_told(tmp_path):
    if not (BUILT.parent / "examples/fake-machine").exists():
        pytest.skip("cargo build --examples builds the made-up machine")
    here, here_env = machine_with_nics(tmp_path, "here")
    there, there_env = machine_with_nics(tmp_path, "there", mlx5_0="mlx5_3", mlx5_3="mlx5_0")
    with another_host() as host:
        flags = ["--gpus", "0-1", "--host", host.here]
        with cluster(*flags, env=here_env.items(), machine=here) as home:
            env = {**there_env, SECRET: cuda_cluster.attach(home).env()[SECRET]}
            with joined(home, host, "--host", host.there, env=env.items(), machine=there):
                code, found = verified(home)
                assert code == 4
                assert len(found["measured"]) == 4, "each NIC receives"
                for row in found["measured"]:
                    missed = f"RDMA on {row['to_nics'][0]} expected, direct/tcp used"
                    assert row["verdict"].startswith(f"below plan: {missed} because the receiver takes"), row
                    assert row["moved_bytes"] > 0 and row["lanes"] == ["direct/tcp"]
                assert [(one["worker"], one["nics"], one["other_nics"]) for one in found["rails"]] == [
                    ("gpu0", ["mlx5_0:1"], ["mlx5_3:1"]), ("gpu1", ["mlx5_3:1"], ["mlx5_0:1"])
                ]  # fmt: skip
                told = asked("verify", home, "--budget", "100ms").stdout
                assert "0 of 2 workers have the same NIC on both hosts" in told and "verified" not in told


def moved(client, where):
    """Bytes that a worker makes arrive on another."""
    import numpy as np

    made = client.submit(np.arange, 3_000_000, workers=[where[0]], pure=False)
    assert client.submit(np.sum, made, workers=[where[1]], pure=False).result(60) == sum(range(3_000_000))


def over_direct(home):
    return Client(scheduler_of(home), timeout=60)


def test_over_direct_hosts_of_one_kernel_with_clocks_and_memory_of_their_own_are_two(monkeypatch):
    with another_host(*OF_ITS_OWN) as host:
        with cluster("--gpus", "0-1", "--protocol", "direct", "--host", host.here) as home:
            secret = {SECRET: cuda_cluster.attach(home).env()[SECRET]}
            with joined(home, host, "--host", host.there, env=secret.items()):
                code, found = verified(home, "--all")
                assert code == 0 and len(found["hosts"]) == 2
                assert {tuple(one["lanes"]) for one in found["measured"]} == {("direct/tcp",)}, found
                monkeypatch.setenv(SECRET, secret[SECRET])
                with dask_config(secret[SECRET]), over_direct(home) as client:
                    known = client.scheduler_info(n_workers=-1)["workers"]
                    ours = {one["name"]: address for address, one in known.items()}
                    far = next(name for name in ours if "guests" in str(name))
                    moved(client, [ours["gpu0"], ours[far]])
                    moved(client, [ours[far], ours["gpu0"]])


def dask_config(secret):
    import dask

    return dask.config.set({"distributed.comm.direct.secret-file": secret})


def test_containers_of_one_network_are_one_machine_and_share_memory_as_far_as_they_can():
    with namespaces("--pid", "--mount", "--mount-proc") as pid, another_host() as host:
        container = type("Container", (), {})()
        container.command = lambda *words: ["nsenter", "--pid", "--mount", "--target", str(pid), *words]
        with cluster("--gpus", "0-1", "--protocol", "direct", "--host", host.here) as home:
            secret = {SECRET: cuda_cluster.attach(home).env()[SECRET]}
            with joined(home, container, "--host", host.here, env=secret.items()):
                code, found = verified(home)
                assert (code, found["pairs"], len(found["hosts"])) == (0, 0, 1), found
                with dask_config(secret[SECRET]), over_direct(home) as client:
                    known = client.scheduler_info(n_workers=-1)["workers"]
                    ours = {one["name"]: address for address, one in known.items()}
                    far = next(name for name in ours if "guests" in str(name))
                    for _ in range(3):
                        moved(client, [ours["gpu0"], ours[far]])
                    received = client.run(
                        lambda: __import__("cuda_cluster.comm").comm.received(), workers=[ours[far]]
                    )[ours[far]]
                    # No path is needed: its memory has no name, and its descriptor is handed over.
                    assert received["mapped"] + received["copied"] > received["socket"], received


def test_who_does_not_know_the_secret_or_has_another_is_told_at_once_what_to_do(tmp_path):
    other = tmp_path / "other"
    other.write_text("7" * 64)
    other.chmod(0o600)
    file = tmp_path / "scheduler.json"
    flags = ["--gpus", "0", "--protocol", "direct", "--scheduler-file", str(file)]
    with another_host() as host, cluster(*flags, "--host", host.here) as home:
        for env, why in [
            ({}, "the peer has a secret, and this process has none"),
            ({SECRET: str(other)}, "the peer has another secret"),
        ]:
            begun = time.monotonic()
            with joined(home, host, "--host", host.there, env=env.items()) as guest:
                assert guest.ended() == 1, guest.output
            assert why in guest.output and f"name the copy here: {SECRET}" in guest.output, guest.output
            assert time.monotonic() - begun < 60
        # Who has it, and does not know from the file that its own listeners should ask for it, too.
        knows = {SECRET: cuda_cluster.attach(home).env()[SECRET]}
        with joined(home, host, "--host", host.there, env=knows.items(), join=str(file)):
            told = asked("ps", f"guests-{os.getpid()}", "-o", "json").stdout
            assert "where nobody is asked for the secret" in told, told


@pytest.mark.skipif("CUDA_CLUSTER_INSTALLED" in os.environ, reason="this Python has the package")
def test_a_host_without_the_package_is_told_its_name_also_when_only_a_file_says_what_is_spoken(tmp_path):
    file = tmp_path / "scheduler.json"
    flags = ["--gpus", "0", "--protocol", "direct", "--scheduler-file", str(file)]
    with another_host() as host, cluster(*flags, "--host", host.here) as home:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(BUILT), "up", "--name", "lacks", *MACHINE, "--gpus", "1", "--host", host.there]
        for join, why in [
            (scheduler_of(home), "lacks cuda-cluster for the protocol direct"),
            (str(file), "cannot speak to the scheduler at direct://"),
        ]:
            joins = host.command(*command, "--join", join)
            said = subprocess.run(joins, env=env, capture_output=True, text=True, timeout=120, check=False)
            assert said.returncode != 0 and why in said.stderr, said.stderr
            assert "-m pip install cuda-cluster" in said.stderr, said.stderr
        shutil.rmtree(f"{RUNTIME}/cuda-cluster/lacks", ignore_errors=True)


def test_hosts_with_another_distributed_are_told_with_both_versions():
    import distributed

    if not OLDEST.exists():
        pytest.skip(".venv-oldest is not here; scripts/setup.sh --tests")
    machine = [*MACHINE[:-1], str(OLDEST)]
    with another_host() as host, cluster("--gpus", "0-1", "--host", host.here) as home:
        with joined(home, host, "--host", host.there, machine=machine) as guest:
            assert guest.process.poll() is None, guest.output
            notes = json.loads(asked("ps", home, "-o", "json").stdout)["scheduler"]["notes"]
            words = f"differ: distributed 2025.4.0 there, {distributed.__version__} here"
            assert sum(words in note for note in notes) == 1, notes
            assert words in asked("ps", home).stdout + asked("ps", home, "-o", "wide").stdout
            code, found = verified(home)
            assert code == 0, found


@pytest.fixture
def engine(monkeypatch):
    """The package of a cluster's processes."""
    monkeypatch.syspath_prepend(str(ROOT / "crates/cluster/src/python"))


@pytest.mark.parametrize("age", [-7200, 7200])
def test_a_file_is_waited_for_while_it_is_written_whatever_the_other_hosts_clock_says(engine, tmp_path, age):
    from cuda_cluster_dask import nanny

    file = tmp_path / "scheduler.json"

    async def read():
        file.write_text('{"addr')
        os.utime(file, (time.time() - age,) * 2)
        reading = asyncio.ensure_future(nanny._read_address(str(file)))
        await asyncio.sleep(0.5)
        assert not reading.done()
        file.write_text('{"address": "tcp://10.0.0.1:8786"}')
        return await asyncio.wait_for(reading, 10)

    assert asyncio.run(read()) == "tcp://10.0.0.1:8786"


def test_a_port_has_received_what_the_kernel_counts_in_words(engine, tmp_path, monkeypatch):
    from cuda_cluster_dask import measure

    for port, words in [("1", "250\n"), ("2", "N/A (no PMA)\n")]:
        counters = tmp_path / f"class/infiniband/mlx5_0/ports/{port}/counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_data").write_text(words)
    monkeypatch.setenv("CUDA_CLUSTER_SYSFS", str(tmp_path))
    assert measure.received(["mlx5_0:1", "mlx5_0:2", "mlx5_1:1", "odd"]) == {"mlx5_0:1": 1000}


#: An endpoint over two ports and TCP, in the form of what `ucp_ep_print_info` writes; the ports are made up.
ENDPOINT = """\
#               lane[0]:  9:rc_mlx5/mlx5_0:1.0 md[5]      -> md[5]/ib/sysdev[2] rma_bw#0 am am_bw#0
#               lane[1]: 11:rc_mlx5/mlx5_1:1.0 md[6]      -> md[6]/ib/sysdev[3] rma_bw#1
#               lane[2]:  2:tcp/eth0.1         md[1]      -> md[1]/tcp/sysdev[255] wireup
"""


def test_the_rails_of_an_endpoint_are_read_from_what_ucx_prints(engine):
    from cuda_cluster_dask import lanes

    assert lanes.LANE.findall(ENDPOINT) == ["rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1", "tcp/eth0"]


def test_hosts_that_differ_are_told_with_both_versions(engine):
    from cuda_cluster_dask import joined

    own = joined.versions("0.1.0")
    other = {**own, "cuda-cluster": "0.2.0"}
    assert joined.differences(other, own) == ["cuda-cluster 0.2.0 there, 0.1.0 here"]
    assert joined.differences(own, own) == joined.differences(None, own) == joined.differences({}, own) == []
    assert joined.machine() == joined.machine() and len(joined.machine()) == 16


def test_a_link_that_is_cut_is_not_measured_and_no_success(monkeypatch):
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP", "12s")
    with another_host() as host, cluster("--gpus", "0", "--host", host.here) as home:
        with joined(home, host, "--host", host.there):
            assert verified(home)[0] == 0
            host.set("down")
            code, found = verified(home)
            host.set("up")
            verdicts = [row["verdict"] for row in found["measured"]]
            assert code == 4 and len(verdicts) == 2, found
            assert all(verdict.startswith("not measured: ") for verdict in verdicts), verdicts
            until(lambda: [one.state for one in cuda_cluster.attach(home).state().joined] == ["ready"] * 2)
            assert verified(home)[0] == 0
