"""`up --hosts`: one command brings up workers on several hosts over ssh, and whatever ends first, nothing is
left on any of them. The hosts are networks of this machine, each with an sshd of its own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import cuda_cluster
import pytest
from conftest import BUILT, RUNTIME, eventually
from distributed import Client, Security
from hosts import needs_network
from ssh_hosts import SshHosts, missing

pytestmark = [
    needs_network,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {missing()}; scripts/setup.sh --tests"),
    pytest.mark.usefixtures("nothing_is_left"),
]

MACHINE = ["--simulate", "--gpus", "0-1", "--python", sys.executable]


@pytest.fixture(scope="module")
def hosts():
    with SshHosts("b", "c") as hosts:
        yield hosts


def asked(*words, within=180):
    return subprocess.run([str(BUILT), *words], capture_output=True, text=True, timeout=within, check=False)


class Up:
    """An `up` over hosts, in the foreground unless it is detached."""

    def __init__(self, hosts, named, *words, topology="dgx-h100"):
        self.name = f"ssh-{os.getpid()}"
        self.log = Path(hosts.folder) / "up.log"
        command = [str(BUILT), "up", "-f", str(hosts.folder / "hosts.yaml"), "--hosts", named]
        command += ["--name", self.name, "--topology", topology, *MACHINE, "--ready-within", "3m", *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def said(self):
        return self.log.read_text()

    def ready(self):
        def is_ready():
            assert self.process.poll() is None, self.said()
            return "READY: " in self.said()

        eventually(is_ready, "READY", within=180)
        return self

    def ended(self, within=60):
        """Its exit code."""
        return self.process.wait(timeout=within)

    def state(self):
        said = asked("ps", self.name, "-o", "json")
        assert said.returncode == 0, said.stderr
        return json.loads(said.stdout)

    def ssh(self, host):
        """The process of ssh that leads to a host."""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")
                own = (
                    f"CUDA_CLUSTER_PROCESS=host-{host}\0".encode()
                    in Path(f"/proc/{entry}/environ").read_bytes()
                )
                if own and words[0] == "ssh" and words[-2] == "cuda-cluster __member":
                    return int(entry)
        raise AssertionError(f"no ssh to {host}")


@pytest.fixture
def up(hosts):
    """Starts one; at the end nothing may be left on any host."""
    started = []

    def start(named, *words, **machine):
        started.append(Up(hosts, named, *words, **machine))
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait()
        asked("down", one.name)
        for place in (RUNTIME, *(host.runtime for host in hosts.all.values())):
            shutil.rmtree(f"{place}/cuda-cluster/{one.name}", ignore_errors=True)


def nothing_there(hosts, within):
    for host in hosts.all.values():
        left = lambda host=host: f"nothing on {host.name}: {host.left()}"  # noqa: E731
        eventually(lambda host=host: not host.left(), left, within)


def joined(state):
    """Hosts of the workers that have joined and are there."""
    return sorted(one["host"] for one in state.get("joined", []) if one["state"] == "ready")


def test_three_hosts_are_one_cluster_until_it_is_taken_down(hosts, up):
    cluster = up("localhost,b,c").ready()
    assert "READY: " in cluster.said()
    assert "2 workers here and 4 workers of 2 other machines" in cluster.said()
    state = cluster.state()
    assert [one["name"] for one in state["workers"]] == ["gpu0", "gpu1"]
    assert [(one["name"], one["host"], one["state"]) for one in state["hosts"]] == [
        ("host-b", "b", "ready"), ("host-c", "c", "ready"),
    ]  # fmt: skip
    assert joined(state) == ["b", "b", "c", "c"]
    shown = asked("ps", cluster.name).stdout
    assert "host-b" in shown and f"b-{cluster.name}-gpu1" in shown, shown
    # The address from which the hosts are reached, as nobody has said another.
    assert state["scheduler"]["address"].startswith(f"tcp://{hosts.here}:")
    with Client(state["scheduler"]["address"]) as client:
        assert sorted(client.run(socket.gethostname).values()) == sorted(
            ["b", "b", "c", "c", *2 * [socket.gethostname()]]
        )
        by_host = {one["host"]: one["address"] for one in state["joined"]}
        made = client.submit(bytes, 3_000_000, workers=[by_host["b"]])
        assert client.submit(len, made, workers=[by_host["c"]]).result(timeout=60) == 3_000_000
        assert sum(client.gather(client.map(pow, range(100), [2] * 100))) == 328350
    for host in hosts.all.values():
        assert any("__member" in one for one in host.processes().values())
    assert asked("down", cluster.name).returncode == 0
    assert cluster.ended() == 0, cluster.said()
    nothing_there(hosts, within=1)


def test_without_this_machine_it_has_the_scheduler_alone(hosts, up):
    cluster = up("b", "--detach")
    assert cluster.ended(within=180) == 0, cluster.said()
    state = cluster.state()
    assert state["workers"] == []
    assert joined(state) == ["b", "b"]
    assert asked("down", cluster.name).returncode == 0
    nothing_there(hosts, within=1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            "refusing",
            "refusing is not reached: ssh: connect to host 198.18.0.1 port 2222: Connection refused",
        ),
        ("absent", "absent is not reached: ssh: connect to host 198.18.0.99 port 2222: "),
        ("keyless-c", "keyless-c is not reached: root@198.18.0.3: Permission denied (publickey)."),
    ],
)
def test_a_host_that_is_not_reached_is_named_with_sshs_own_line(hosts, up, wrong, told):
    cluster = up(f"localhost,b,{wrong}")
    assert cluster.ended(within=180) == 1, cluster.said()
    assert f"host-{wrong} could not start: {told}" in cluster.said()
    assert f"try: ssh -F {hosts.folder / 'ssh_config'} {wrong} true" in cluster.said()
    nothing_there(hosts, within=10)


def test_a_host_without_the_program_is_named_with_what_to_do(hosts, up):
    program = hosts["c"].programs / "cuda-cluster"
    program.unlink()
    try:
        cluster = up("localhost,b,c")
        assert cluster.ended(within=180) == 1, cluster.said()
        assert "host-c could not start: c has no cuda-cluster (" in cluster.said()
        assert "'dask.hosts_program'" in cluster.said()
        nothing_there(hosts, within=10)
        # With its path it is found.
        cluster = up("c", "--detach", "--hosts-program", str(BUILT))
        assert cluster.ended(within=180) == 0, cluster.said()
        assert asked("down", cluster.name).returncode == 0
    finally:
        program.symlink_to(BUILT)


def test_another_version_is_named(hosts, up):
    program = hosts["c"].programs / "cuda-cluster"
    program.unlink()
    program.write_text('#!/bin/sh\necho \'{"member": "hello", "version": "0.0.7"}\'\nexec cat\n')
    program.chmod(0o755)
    try:
        cluster = up("b,c")
        assert cluster.ended(within=180) == 1, cluster.said()
        assert "c has version 0.0.7 of cuda-cluster, and this machine has " in cluster.said()
        nothing_there(hosts, within=10)
    finally:
        program.unlink()
        program.symlink_to(BUILT)


def test_what_fails_on_a_host_is_told_here(hosts, up):
    # A network that this machine alone has.
    cluster = up("b", "--interface", "hosts")
    assert cluster.ended(within=180) == 1, cluster.said()
    assert "host-b could not start: b: " in cluster.said()
    assert "there is no network interface hosts here" in cluster.said()
    nothing_there(hosts, within=10)


def test_a_name_that_is_taken_on_a_host_is_told(hosts, up):
    cluster = up("b").ready()
    runtime = str(hosts["c"].runtime)
    other = [
        "env",
        f"XDG_RUNTIME_DIR={runtime}",
        str(BUILT),
        "up",
        "--name",
        cluster.name,
        "--detach",
        "--topology",
        "dgx-h100",
        *MACHINE,
    ]
    brought = subprocess.run(
        hosts["c"].command(*other, "--engine", "dask"),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert brought.returncode == 0, brought.stderr
    assert asked("down", cluster.name).returncode == 0
    assert cluster.ended() == 0
    refused = up("b,c")
    assert refused.ended(within=180) == 1, refused.said()
    assert "host-c could not start: c: " in refused.said()
    eventually(lambda: not hosts["b"].left(), "nothing on b", 10)
    down = ["env", f"XDG_RUNTIME_DIR={runtime}", str(BUILT), "down", cluster.name]
    assert subprocess.run(hosts["c"].command(*down), check=False, timeout=60).returncode == 0


def test_ctrl_c_ends_all(hosts, up):
    cluster = up("localhost,b,c").ready()
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.ended() == 130, cluster.said()
    nothing_there(hosts, within=1)


def test_ctrl_c_while_it_starts_ends_all(hosts, up):
    cluster = up("localhost,b,c")
    eventually(lambda: hosts["b"].processes() and hosts["c"].processes(), "both have begun", 120)
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.ended() == 130, cluster.said()
    nothing_there(hosts, within=10)


def test_nothing_is_left_where_workers_miss_the_scheduler_before_its_end_is_told(hosts, up):
    cluster = up("localhost,b").ready()
    [member] = [pid for pid, command in hosts["b"].processes().items() if "__member" in command]
    os.kill(member, signal.SIGSTOP)
    os.kill(cluster.state()["supervisor_pid"], signal.SIGKILL)
    # Its workers end for want of a scheduler, and their cluster has failed.
    eventually(lambda: len(hosts["b"].working()) == 1, lambda: f"ended: {hosts['b'].working()}", 120)
    assert hosts["b"].left()[0].endswith(cluster.name)
    os.kill(member, signal.SIGCONT)
    nothing_there(hosts, within=30)


def test_nothing_is_left_where_workers_leave_with_the_scheduler_before_its_end_is_told(hosts, up):
    cluster = up("localhost,b").ready()
    before = hosts["b"].working()
    [member] = [pid for pid, command in hosts["b"].processes().items() if "__member" in command]
    told_by = int(Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[1])
    assert "sshd" in Path(f"/proc/{told_by}/cmdline").read_text()
    os.kill(told_by, signal.SIGSTOP)
    try:
        down = subprocess.Popen([BUILT, "down", cluster.name])
        # The network tells workers of the scheduler's end, and nothing yet tells their supervisor.
        eventually(lambda: len(hosts["b"].working()) < len(before), "its workers leave", 60)
        eventually(lambda: len(hosts["b"].working()) == 1, lambda: f"ended: {hosts['b'].working()}", 2)
        assert hosts["b"].left()[0].endswith(cluster.name)
    finally:
        os.kill(told_by, signal.SIGCONT)
    assert down.wait(60) == 0
    nothing_there(hosts, within=1)


@pytest.mark.parametrize("victim", ["up", "supervisor"])
def test_nothing_is_left_when_it_is_killed_here(hosts, up, victim):
    cluster = up("localhost,b,c").ready()
    pid = cluster.process.pid if victim == "up" else cluster.state()["supervisor_pid"]
    os.kill(pid, signal.SIGKILL)
    nothing_there(hosts, within=30)


def test_a_connection_that_is_cut_ends_the_workers_there_and_is_made_again(hosts, up):
    cluster = up("localhost,b,c").ready()
    before = hosts["c"].processes()
    os.kill(cluster.ssh("c"), signal.SIGKILL)
    eventually(lambda: not before.keys() & hosts["c"].processes().keys(), "its workers end", 30)
    eventually(lambda: joined(cluster.state()) == ["b", "b", "c", "c"], "and are back", 120)
    state = cluster.state()
    assert [one["restarts"] for one in state["hosts"]] == [0, 1], state["hosts"]
    told = "could not go on: the connection to c is lost: ssh ended: signal: 9 (SIGKILL)"
    assert told in asked("events", cluster.name).stdout
    assert told in cluster.said()
    [row] = [line for line in asked("ps", cluster.name).stdout.splitlines() if line.startswith("host-c")]
    assert told in row, row
    assert asked("down", cluster.name).returncode == 0
    nothing_there(hosts, within=1)


def test_a_supervisor_that_is_killed_on_a_host_is_told_here_and_leaves_nothing(hosts, up):
    cluster = up("b").ready()
    before = hosts["b"].processes()
    [supervisor] = [pid for pid, command in before.items() if "__supervise" in command]
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not before.keys() & hosts["b"].processes().keys(), "all end there", 30)
    eventually(lambda: joined(cluster.state()) == ["b", "b"], "and are back", 120)
    assert "host-b: could not go on: b: " in asked("events", cluster.name).stdout
    assert asked("down", cluster.name).returncode == 0
    nothing_there(hosts, within=1)


def test_a_host_whose_network_is_lost_without_a_word_ends_its_workers(hosts, up, tmp_path):
    spec = tmp_path / "sooner.yaml"
    # A connection on which nothing arrives any more breaks after that.
    spec.write_text("version: 1\ndask: {config: {distributed.comm.timeouts.tcp: 12s}}\n")
    cluster = up("b", "-f", str(spec)).ready()
    hosts["b"].set("down")
    try:
        # The scheduler is lost for them: its host may be gone.
        eventually(lambda: not hosts["b"].working(), "its workers end", 120)
        assert asked("down", cluster.name).returncode == 0
        assert cluster.ended() == 0, cluster.said()
    finally:
        hosts["b"].set("up")
    eventually(lambda: not hosts["b"].working(), "nothing runs there", 60)
    # Why it ended is kept there, as of any cluster that has failed.
    assert "the scheduler that its workers had joined is lost" in hosts["b"].asked("ps", "-a", cluster.name)


def test_a_python_program_has_hosts_too(hosts):
    name = f"python-{os.getpid()}"
    spec = str(hosts.folder / "hosts.yaml")
    machine = {"simulate": True, "topology": "dgx-h100", "gpus": "0", "python": sys.executable}
    with cuda_cluster.up(
        spec=spec, hosts=["localhost", "c"], name=name, ready_within="3m", **machine
    ) as cluster:
        state = cluster.state()
        assert [(one.name, one.host, one.state) for one in state.hosts] == [("host-c", "c", "ready")]
        assert [one.host for one in state.joined] == ["c"]
    nothing_there(hosts, within=1)


@pytest.fixture
def only_here():
    """A folder that the hosts, which have a `/run` of their own, do not see."""
    with tempfile.TemporaryDirectory(prefix="only-here-", dir="/run") as folder:
        yield Path(folder)


def test_hosts_are_given_the_topology_and_the_files_of_tls(hosts, up, only_here):
    certificate, key, machine = (only_here / name for name in ("cert.pem", "key.pem", "machine.yaml"))
    subject = ["-subj", f"/CN={hosts.here}", "-addext", f"subjectAltName=IP:{hosts.here}"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    machine.write_text((Path(__file__).parents[2] / "topologies/dgx-h100.yaml").read_text())
    files = {"ca-file": certificate, "cert": certificate, "key": key}
    words = [word for name, file in files.items() for word in (f"--tls-{name}", str(file))]
    cluster = up("localhost,b", *words, topology=str(machine)).ready()
    state = cluster.state()
    assert joined(state) == ["b", "b"]
    assert state["scheduler"]["address"].startswith("tls://")
    carried = hosts["b"].runtime / "cuda-cluster" / cluster.name / "carried"
    assert carried.stat().st_mode & 0o777 == 0o700
    there = {one.name: one for one in carried.iterdir()}
    assert there.keys() == {"ca.pem", "cert.pem", "key.pem"}
    assert there["key.pem"].read_text() == key.read_text()
    assert there["key.pem"].stat().st_mode & 0o777 == 0o600
    secret = key.read_text().splitlines()[1]
    assert not any(secret in command for command in hosts["b"].processes().values())
    security = Security(
        require_encryption=True, tls_ca_file=str(certificate), tls_client_cert=str(certificate),
        tls_client_key=str(key),
    )  # fmt: skip
    with Client(state["scheduler"]["address"], security=security) as client:
        addresses = [one["address"] for one in state["joined"]]
        assert all(address.startswith("tls://198.18.0.2:") for address in addresses)
        assert client.submit(sum, [1, 2], workers=addresses).result(timeout=60) == 3
    # What a killed supervisor leaves has no key.
    before = hosts["b"].processes()
    [supervisor] = [pid for pid, command in before.items() if "__supervise" in command]
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not before.keys() & hosts["b"].processes().keys(), "all end there", 30)
    eventually(lambda: joined(cluster.state()) == ["b", "b"], "and are back", 120)
    assert asked("down", cluster.name).returncode == 0
    nothing_there(hosts, within=1)


def test_a_file_of_tls_that_is_gone_is_named(hosts, up, only_here):
    absent = str(only_here / "absent.pem")
    cluster = up("b", "--tls-ca-file", absent, "--tls-cert", absent, "--tls-key", absent)
    assert cluster.ended() == 2, cluster.said()
    assert absent in cluster.said()


def test_each_host_is_checked_first_if_that_is_asked_for(hosts, up):
    # Nothing can be written there.
    place = ["/dev/shm"]
    subprocess.run(hosts["c"].command("mount", "-t", "tmpfs", "-o", "ro", "none", *place), check=True)
    try:
        cluster = up("localhost,b,c", "--preflight")
        assert cluster.ended(within=180) == 1, cluster.said()
        assert "host-c could not start: c: preflight refuses the plan" in cluster.said()
        assert "shared-memory" in cluster.said()
        nothing_there(hosts, within=10)
    finally:
        subprocess.run(hosts["c"].command("umount", *place), check=True)


def test_workers_of_hosts_listen_where_the_scheduler_is_reached(hosts, up):
    """Over direct, which takes any address of a host otherwise."""
    cluster = up("localhost,b,c", "--protocol", "direct").ready()
    state = cluster.state()
    addresses = {one["host"]: one["address"] for one in state["joined"]}
    assert addresses["b"].startswith("direct://198.18.0.2:"), addresses
    assert addresses["c"].startswith("direct://198.18.0.3:"), addresses
    said = asked("env", cluster.name, "-o", "json")
    assert said.returncode == 0, said.stderr
    secret = Path(RUNTIME) / "cuda-cluster" / cluster.name / "secret"
    program = f"""
import dask
dask.config.set({{"distributed.comm.direct.secret-file": {str(secret)!r}}})
from distributed import Client
with Client({state["scheduler"]["address"]!r}) as client:
    made = client.submit(bytes, 3_000_000, workers=[{addresses["b"]!r}])
    print(client.submit(len, made, workers=[{addresses["c"]!r}]).result(timeout=60))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "3000000\n", ran.stderr
    assert asked("down", cluster.name).returncode == 0
    nothing_there(hosts, within=1)


def test_the_secret_and_variables_are_on_no_command_line(hosts, up, tmp_path):
    spec = tmp_path / "token.yaml"
    spec.write_text("version: 1\nworker: {env: {TOKEN: hunter2-hunter2}}\n")
    cluster = up("b", "-f", str(spec)).ready()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            assert b"hunter2-hunter2" not in Path(f"/proc/{entry}/cmdline").read_bytes()
    with Client(cluster.state()["scheduler"]["address"]) as client:
        assert set(client.run(os.getenv, "TOKEN").values()) == {"hunter2-hunter2"}
    assert asked("down", cluster.name).returncode == 0
    nothing_there(hosts, within=1)
