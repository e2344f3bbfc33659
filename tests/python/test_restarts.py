"""Ranks of `run` that are started again together, and ranks that are forked."""

import json
import os
import re
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

#: Where MPICH's ranks share memory.
MPICH = Path("/dev/shm")

#: How many ranks are killed while others write; `scripts/chaos.sh` is for supervisors.
FAULTS = int(os.environ.get("RESTARTS_FAULTS", "12"))


def command(program, *flags, ranks=3, restarts=1, arguments=()):
    run = [str(BUILT), "run", "--topology", "dgx-a100", "--simulate", "-n", str(ranks)]
    python = [sys.executable, *program, *arguments]
    return [*run, "--restarts", str(restarts), "--ready-within", "10m", *flags, "--", *python]


def run(program, *flags, **options):
    """What `run` says of a Python program: its text, or words for Python."""
    words = ["-c", textwrap.dedent(program)] if isinstance(program, str) else program
    return subprocess.run(
        command(words, *flags, **options),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def forget(name):
    """What is known of failures is kept, and not needed here."""
    shutil.rmtree(f"{RUNTIME}/cuda-cluster/{name}")


def lines(said):
    assert said.returncode == 0, said.stdout + said.stderr
    return sorted(said.stdout.splitlines())


#: One rank of the first start is killed when all have met at rank 0's address.
ONE_IS_KILLED = """
    import os, signal, socket, time
    restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    size, place = int(os.environ["WORLD_SIZE"]), ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(place) as listener:
            others = [listener.accept()[0] for _ in range(size - 1)]
        total = sum(other.recv(1)[0] for other in others)
        for other in others:
            other.sendall(bytes([total]))
    else:
        for _ in range(600):
            try:
                root = socket.create_connection(place)
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        root.sendall(bytes([1 + restart]))
        total = root.recv(1)[0]
    if restart == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if restart == 0:
        time.sleep(100)
    os.write(1, f"{restart} {rank} {size} {total}\\n".encode())
"""


def test_all_ranks_start_again_and_meet_anew_when_one_is_killed():
    said = run(ONE_IS_KILLED, "--name", "again")
    forget("again")
    assert lines(said) == [f"1 {rank} 3 4" for rank in range(3)]
    told = "rank 1: gpu1 was ended by signal 9 (SIGKILL); all ranks are started again (1 of 1)"
    assert f"run: {told}" in said.stderr


#: Ranks of MPI, of which one of the first start is killed when all have met.
ONE_OF_MPI_IS_KILLED = """
    import os, signal
    from mpi4py import MPI
    ranks = MPI.COMM_WORLD
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    total = ranks.allreduce(1 + restart)
    if restart == 0 and ranks.Get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.Barrier()
    os.write(1, f"{restart} {ranks.Get_rank()} {ranks.Get_size()} {total}\\n".encode())
"""


def test_mpis_ranks_of_one_start_do_not_meet_what_killed_ones_of_the_same_name_have_left():
    pytest.importorskip("mpi4py", reason="scripts/setup.sh --tests installs mpi4py and MPICH")
    before = set(MPICH.glob("mpich_shm_*"))
    for _ in range(2):
        said = run(ONE_OF_MPI_IS_KILLED, "--name", "mpi")
        forget("mpi")
        assert lines(said) == [f"1 {rank} 3 6" for rank in range(3)]
    # MPICH's killed ranks leave it, and nobody but MPICH knows whose it is.
    for left in set(MPICH.glob("mpich_shm_*")) - before:
        left.unlink(missing_ok=True)


def test_a_job_is_started_again_so_often_and_then_fails_as_its_rank_did():
    program = """
        import os, signal, time
        # In one piece: the others may be ended at any time.
        os.write(1, os.environ["TORCHELASTIC_RESTART_COUNT"].encode() + b"\\n")
        if os.environ["RANK"] == "2":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
    """
    said = run(program, "--name", "often", restarts=2)
    assert said.returncode == 128 + signal.SIGTERM, said.stderr
    assert sorted(said.stdout.split()) == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
    assert "(SIGTERM), and the ranks were started again 2 times" in said.stderr
    forget("often")


def test_a_program_that_fails_at_its_start_is_not_started_again():
    said = run("import no_such_module", "--name", "soon", restarts=5)
    assert said.returncode == 1
    assert "it failed within 30s of its start, as it would again" in said.stderr
    assert "started again" not in said.stderr.replace("as it would again", "")
    forget("soon")


def test_spares_and_restarts_are_checked():
    both = run("pass", "--spares", "1", restarts=0)
    assert both.returncode == 2
    assert "a spare takes a place only when the ranks are started again" in both.stderr
    many = run("pass", "--spares", "6")
    assert many.returncode == 2, many.stderr
    assert "9" in many.stderr and "8" in many.stderr
    shown = """
        import os
        print(os.environ["WORLD_SIZE"], os.environ.get("CUDA_VISIBLE_DEVICES"))
    """
    assert {line.split()[0] for line in lines(run(shown, "--spares", "5"))} == {"3"}


def test_no_line_is_lost_and_no_process_left_however_often_ranks_are_killed(tmp_path):
    """Each rank counts in a file what it has written; all of it arrives, in order."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            restart, rank, here = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], sys.argv[1]
            count = os.open(f"{here}/{restart}-{rank}", os.O_CREAT | os.O_WRONLY)
            os.write(os.open(f"{here}/pids", os.O_CREAT | os.O_WRONLY | os.O_APPEND), b"%d " % os.getpid())
            for line in range(10**9):
                if os.path.exists(f"{here}/enough"):
                    break
                os.write(1, b"%s %s %d\\n" % (restart.encode(), rank.encode(), line))
                os.pwrite(count, b"%10d" % (line + 1), 0)
                time.sleep(0.002)
            """
        )
    )
    # Without waits between starts that fail soon.
    spec = tmp_path / "spec.yaml"
    spec.write_text("version: 1\nsupervision: {backoff: 1ms, backoff_max: 1ms}\n")
    flags = ["-f", str(spec), "--bootstrap", "torch", "--name", "faults"]
    started = command([str(program)], *flags, restarts=FAULTS, arguments=[str(tmp_path)])
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as running:
        seen: list[str] = []
        for fault in range(FAULTS):
            # A line of each rank of this start.
            waiting = {f"{fault} {rank} " for rank in range(3)}
            while waiting:
                seen.append(running.stdout.readline())
                waiting -= {start for start in waiting if seen[-1].startswith(start)}
            pids = (tmp_path / "pids").read_text().split()
            how = [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP][fault % 3]
            os.kill(int(pids[-1 - fault % 3]), how)
            if how == signal.SIGSTOP:
                os.kill(int(pids[-1 - (fault + 1) % 3]), signal.SIGKILL)
        (tmp_path / "enough").touch()
        seen += running.stdout.readlines()
    assert running.returncode == 0
    forget("faults")
    for restart in range(FAULTS + 1):
        for rank in range(3):
            own = [int(line.split()[2]) for line in seen if line.startswith(f"{restart} {rank} ")]
            assert own == list(range(len(own))), (restart, rank)
            counted = tmp_path / f"{restart}-{rank}"
            written = int(counted.read_text() or 0) if counted.exists() else 0
            # A rank may be killed between a line and its count.
            assert len(own) - written in (0, 1), (restart, rank)


#: A program that shows everything that differs between a rank that is forked and one that is not.
SHOWN = """
    import json, os, sys, threading
    class Named: pass
    here = sys.modules["__main__"]
    shown = {
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": globals().get("__file__"),
        "main": here.__dict__ is globals() and Named.__module__, "threads": threading.active_count(),
        "decoder": "json" in sys.modules, "cpus": sorted(os.sched_getaffinity(0)),
        "rank": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
        "input": sys.stdin.read(), "flags": sys.flags.dont_write_bytecode,
        "status": "CUDA_CLUSTER_STATUS_FD" in os.environ,
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:4],
    }
    print(json.dumps(shown), flush=True)
    print("to standard error", file=sys.stderr, flush=True)
"""

WARM = ("--warm", "json,decimal")


@pytest.mark.parametrize("how", ["file", "module", "code"])
def test_a_forked_rank_differs_in_nothing_from_an_executed_one(tmp_path, monkeypatch, how):
    (tmp_path / "shown.py").write_text(textwrap.dedent(SHOWN))
    monkeypatch.chdir(tmp_path)
    words = {
        "file": ["-B", str(tmp_path / "shown.py"), "--lr", "1", ""],
        "module": ["-B", "-m", "shown", "a"],
        "code": ["-B", "-c", textwrap.dedent(SHOWN), "b"],
    }[how]
    none = ("--bootstrap", "torch")
    cold, warm = run(words, *none, restarts=0), run(words, *none, *WARM, restarts=0)
    assert "executed, not forked" not in warm.stderr
    shown = [[json.loads(line) for line in lines(said)] for said in (cold, warm)]
    assert shown[0] == shown[1]
    assert cold.stderr.count("to standard error") == warm.stderr.count("to standard error") == 3
    assert warm.stdout.count("to standard error") == 0


def test_a_forked_ranks_error_is_its_own(tmp_path):
    program = tmp_path / "failing.py"
    program.write_text("import os\ndef f():\n    raise ValueError(os.environ['RANK'])\nf()\n")
    said = run([str(program)], *WARM, "--name", "error", restarts=0, ranks=1)
    assert said.returncode == 1
    trace = [line for line in said.stderr.splitlines() if not line.startswith(("run:", "note:"))]
    assert trace[0] == "Traceback (most recent call last):", said.stderr
    assert trace[1] == f'  File "{program}", line 4, in <module>', said.stderr
    assert trace[-1] == "ValueError: 0"
    forget("error")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("import atexit; atexit.register(print, 'at the end'); raise SystemExit", 0),
        ("import os; os._exit(9)", 9),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT),
        ("raise SystemExit('words')", 1),
        ("import os; os.abort()", 128 + signal.SIGABRT),
    ],
)
def test_a_forked_rank_ends_as_its_program_says(end, status):
    said = run(end, *WARM, "--name", "end", restarts=0, ranks=1)
    assert said.returncode == status, said.stderr
    assert ("at the end" in said.stdout) == ("atexit" in end)
    assert ("words" in said.stderr) == ("words" in end)
    if status:
        forget("end")


def test_a_program_that_is_not_there_ends_a_forked_rank_as_it_does_python():
    said = [run(["/nonexistent.py"], *warm, "--name", "absent", restarts=0, ranks=1) for warm in ((), WARM)]
    forget("absent")
    told = [
        [line for line in one.stderr.splitlines() if "can't open file '/nonexistent.py'" in line]
        for one in said
    ]
    assert [one.returncode for one in said] == [2, 2]
    assert told[0] == told[1] and len(told[0]) == 1


def test_forked_ranks_are_started_again():
    said = run(ONE_IS_KILLED, "--warm", "socket,decimal", "--name", "forked")
    forget("forked")
    assert lines(said) == [f"1 {rank} 3 4" for rank in range(3)]


def test_all_of_eight_ranks_come_back_when_one_is_killed_from_outside():
    """The short form of `scripts/restarts.sh`; how long it takes is not judged here."""
    script = [sys.executable, str(ROOT / "scripts/restarts.py"), "--plain", "-o", "json", "1"]
    environment = {**os.environ, "CUDA_CLUSTER_BIN": str(BUILT)}
    said = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert found.keys() == {"run --restarts", "run --restarts --warm"}
    for name, trials in found.items():
        forked = 8 if name.endswith("--warm") else 0
        [once], [used_up] = trials["measured"], trials["used up"]
        assert once.pop("away") is not None, said.stderr
        assert once == {"ranks": 8, "forked": forked, "code": 0, "left": 0}, name
        assert used_up == {"code": 128 + signal.SIGKILL, "left": 0}, name


def test_random_numbers_of_forked_ranks_differ():
    said = run("import random; print(random.random())", "--warm", "random", restarts=0)
    assert len(set(lines(said))) == 3


def test_what_cannot_be_warm_says_why(tmp_path):
    missing = run("pass", "--warm", "no_such_module", "--name", "missing", restarts=0)
    assert missing.returncode != 0
    assert "cannot import no_such_module: ModuleNotFoundError" in missing.stderr
    forget("missing")
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    )
    (tmp_path / "program.py").write_text("pass\n")
    program = [str(tmp_path / "program.py")]
    threads = run(program, "--warm", "threads", "--name", "threads", restarts=0)
    assert threads.returncode != 0
    assert "the ranks cannot be forked: what was imported started 1 threads" in threads.stderr
    forget("threads")
    shell = [*command([], "--warm", "json", restarts=0)[:-1], "sh", "-c", "true"]
    said = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 2, said.stderr
    assert "sh is not a Python with a program" in said.stderr
    assert re.search("hint: begin the command with python, or leave --warm out", said.stderr)


def test_a_forked_rank_hears_of_the_end(tmp_path):
    program = """
        import os, signal, sys, time
        try:
            open(os.environ["HERE"] + "/" + os.environ["RANK"], "w").close()
            time.sleep(100)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    """
    words = ["-c", textwrap.dedent(program)]
    started = command(words, *WARM, restarts=0)
    environment = {**os.environ, "HERE": str(tmp_path)}
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True, env=environment) as running:
        while len(os.listdir(tmp_path)) < 3:
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        said = running.stdout.read()
    assert running.returncode == 128 + signal.SIGINT
    assert said.count("interrupted") == 3
