"""What `--audit` counts, and what becomes of a verified program that does not use the plan's wires."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import BUILT, ROOT, RUNTIME

pytestmark = pytest.mark.usefixtures("nothing_is_left")

HERE = Path(__file__).parent
SIMULATED = ["--simulate", "--topology", "dgx-h100"]

#: A rank of a program whose NCCL writes that it uses this wire to the next rank.
SAYS = """
    import os, socket, sys, time
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    following = (rank + 1) % world
    name = socket.gethostname()
    line = f"{name}:{os.getpid()}:9 [{rank}] NCCL INFO Channel 00/0 : "
    line += f"{rank}[{rank}] -> {following}[{following}] via {sys.argv[1]}"
    path = os.environ.get("NCCL_DEBUG_FILE", "/dev/stdout")
    with open(path.replace("%h", name).replace("%p", str(os.getpid())), "a") as file:
        print(line, file=file)
"""


def says(wire):
    return ["--", sys.executable, "-c", textwrap.dedent(SAYS), wire]


def run(*words, env=None):
    command = [str(BUILT), "run", *words]
    env = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)


def asked(*words):
    return subprocess.run([str(BUILT), *words], capture_output=True, text=True, timeout=60, check=False)


def until(is_so, seconds=60):
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


@pytest.fixture
def ring(tmp_path):
    """Four ranks, each of which sends 8 MB to the next, in a job that ends when told."""
    name = f"audit-{os.getpid()}"
    command = [str(BUILT), "run", *SIMULATED, "-n", "4", "--name", name, "--audit", "--"]
    command += [sys.executable, str(HERE / "ring.py"), str(8_000_000), str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    job.name = name
    until(lambda: all((tmp_path / f"done-{rank}").exists() for rank in range(4)))
    yield job
    (tmp_path / "end").touch()
    if job.returncode is None:
        job.communicate(timeout=60)
    shutil.rmtree(f"{RUNTIME}/cuda-cluster/{name}", ignore_errors=True)


@pytest.fixture
def dgx(tmp_path):
    """The environment in which this machine has the GPUs of a DGX H100."""
    maker = BUILT.parent / "examples/fake-machine"
    if not maker.exists():
        pytest.skip("cargo build --examples builds the made-up machine")
    command = [maker, ROOT / "topologies/dgx-h100.yaml", tmp_path / "machine"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in said.stdout.splitlines())


def pairs(name):
    said = asked("ps", name, "-o", "json")
    assert said.returncode == 0, said.stderr
    audit = json.loads(said.stdout).get("audit") or {"pairs": []}
    return {(pair["from"], pair["to"]): pair for pair in audit["pairs"]}


def test_bytes_over_sockets_are_counted_for_each_pair_of_ranks(ring, tmp_path):
    expected = {(f"gpu{rank}", f"gpu{(rank + 1) % 4}") for rank in range(4)}

    def counted():
        sent = pairs(ring.name)
        return sent if all(sent.get(way, {}).get("tcp_bytes", 0) >= 8_000_000 for way in expected) else None

    sent = until(counted)
    for way in expected:
        # The kernel counts the begin and the end of a stream, too.
        assert sent[way]["tcp_bytes"] <= 8_000_002
        assert sent[way]["planned"] == "NV18"
    assert set(sent) == expected
    wide = asked("ps", ring.name, "-o", "wide").stdout
    assert "  TCP: gpu0 → gpu1: 7.6 MiB (NV18)" in wide
    (tmp_path / "end").touch()
    output, _ = ring.communicate(timeout=60)
    assert ring.returncode == 0, output
    for rank in range(4):
        assert f"run:   TCP: gpu{rank} → gpu{(rank + 1) % 4}: 7.6 MiB (NV18)" in output
    assert output.count("TCP:") == 4, output


def who_counts(name):
    supervisor = json.loads(asked("ps", name, "-o", "json").stdout)["supervisor_pid"]
    threads = Path(f"/proc/{supervisor}/task").glob("*/children")
    children = [pid for thread in threads for pid in thread.read_text().split()]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
    (counts,) = (int(pid) for pid, words in commands.items() if b"__audit" in words)
    return counts


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_was_not_counted_is_said(number, ring, tmp_path):
    os.kill(who_counts(ring.name), number)
    time.sleep(0.5)
    (tmp_path / "end").touch()
    output, _ = ring.communicate(timeout=60)
    assert ring.returncode == 0, output
    assert "run: the bytes between the processes were not counted: " in output


def test_a_verified_program_has_to_use_the_plans_wires(dgx):
    fast = run("-n", "2", "--verify", *says("P2P/CUMEM"), env=dgx)
    assert fast.returncode == 0, fast.stderr
    assert "→" not in fast.stderr
    slow = run("-n", "2", "--verify", *says("SHM/direct/direct"), env=dgx)
    assert slow.returncode == 4, slow.stderr
    assert "gpu0 → gpu1, gpu1 → gpu0: SHM (NCCL), and the plan says NV18" in slow.stderr
    unwanted = run("-n", "2", "--verify", "--no-audit", *says("SHM/direct/direct"), env=dgx)
    assert unwanted.returncode == 0, unwanted.stderr


def test_what_nccl_writes_with_the_users_own_settings_is_read_where_it_goes():
    said = run(*SIMULATED, "-n", "2", "--audit", *says("SHM/direct/direct"), env={"NCCL_DEBUG": "INFO"})
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("NCCL INFO") == 2, "they are the user's"
    assert "run:   NCCL: SHM (NV18): gpu0 → gpu1, gpu1 → gpu0" in said.stderr


def test_a_job_of_which_nothing_is_seen_is_not_called_good():
    said = run(*SIMULATED, "-n", "2", "--audit", "--", "true")
    assert said.returncode == 0
    assert "no bytes were counted, and no library said which wires it uses" in said.stderr


def test_the_logs_are_there_until_who_counts_has_read_them(tmp_path):
    name, waits = f"audit-{os.getpid()}", f"{SAYS}    while not os.path.exists(sys.argv[2]): time.sleep(0.05)\n"
    program = ["--", sys.executable, "-c", textwrap.dedent(waits), "SHM/direct/direct", str(tmp_path / "end")]
    command = [str(BUILT), "run", *SIMULATED, "-n", "2", "--name", name, "--audit", *program]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    logs = Path(f"{RUNTIME}/cuda-cluster/{name}/audit")
    until(lambda: logs.exists() and len(list(logs.glob("nccl.*"))) == 2)
    time.sleep(0.5)
    counts = who_counts(name)
    os.kill(counts, signal.SIGSTOP)
    (tmp_path / "end").touch()
    time.sleep(1)
    os.kill(counts, signal.SIGCONT)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert "run:   NCCL: SHM (NV18): gpu0 → gpu1, gpu1 → gpu0" in output
