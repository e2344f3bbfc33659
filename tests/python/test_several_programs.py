"""Several programs in one job of `run` (`--program`), and one rank's standard input (`--stdin`)."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import cuda_cluster
import pytest
from conftest import BUILT, RUNTIME, eventually

pytestmark = pytest.mark.usefixtures("nothing_is_left")

#: What a rank is told of itself, in one piece.
SHOWN = """
    import json, os, sys
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    told = {name: os.environ[name] for name in names}
    line = json.dumps({"program": sys.argv[1], "devices": os.environ["CUDA_VISIBLE_DEVICES"], **told})
    os.write(1, line.encode() + b"\\n")
"""

#: Ranks of MPI that all meet, whatever they run.
MPI = """
    import os, sys
    from mpi4py import MPI
    ranks = MPI.COMM_WORLD
    number = ranks.Get_attr(MPI.APPNUM)
    of_program = ranks.Split(number, ranks.Get_rank())
    total = ranks.allreduce(1 << ranks.Get_rank())
    line = f"{sys.argv[1]} {ranks.Get_rank()} {ranks.Get_size()} {number} {of_program.Get_size()} {total}"
    os.write(1, line.encode() + b"\\n")
"""


def python(program, *words):
    return [sys.executable, "-c", textwrap.dedent(program), *words]


def start(*flags, topology="dgx-a100"):
    return [str(BUILT), "run", "--topology", topology, "--simulate", "--ready-within", "10m", *flags]


def programs(**numbers):
    return [word for name, ranks in numbers.items() for word in ("--program", f"{name}={ranks}")]


def run(*command, **options):
    given = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run(command, **{**given, **options})


def lines(said):
    assert said.returncode == 0, said.stdout + said.stderr
    return sorted(said.stdout.splitlines())


def forget(name):
    """What is known of failures is kept, and not needed here."""
    shutil.rmtree(f"{RUNTIME}/cuda-cluster/{name}")


def test_two_programs_are_one_world_on_the_gpus_that_reach_each_other_best():
    flags = [*programs(trainer=4, rollout=4), "--"]
    commands = [*python(SHOWN, "t"), ":", *python(SHOWN, "r", ":x")]
    told = [json.loads(line) for line in lines(run(*start(topology="dgx-1-v100"), *flags, *commands))]
    told.sort(key=lambda one: int(one["RANK"]))
    assert [int(one["RANK"]) for one in told] == list(range(8))
    assert {one["WORLD_SIZE"] for one in told} == {"8"}
    assert [one["program"] for one in told] == ["t"] * 4 + ["r"] * 4
    assert [one["ROLE_NAME"] for one in told] == ["trainer"] * 4 + ["rollout"] * 4
    assert [int(one["ROLE_RANK"]) for one in told] == [0, 1, 2, 3] * 2
    assert {one["ROLE_WORLD_SIZE"] for one in told} == {"4"}
    # The quads of a DGX-1; a rank finds its GPU by its local number.
    assert {one["devices"] for one in told} == {"0,1,2,3,4,5,6,7"}


def test_a_rank_finds_its_gpu_by_its_number_when_programs_take_gpus_out_of_order():
    # On an A100 PCIe machine with bridges the pairs with NVLink are (0, 1) and (2, 3) in the file;
    # one GPU for the first program leaves a whole pair for the second.
    flags = [*programs(one=1, two=2), "--"]
    command = [*python(SHOWN, "a"), ":", *python(SHOWN, "b")]
    said = run(*start(topology="a100-pcie-4-bridges"), *flags, *command)
    told = [json.loads(line) for line in lines(said)]
    plan = run(
        BUILT, "plan", "--topology", "a100-pcie-4-bridges", "--engine", "command", *flags[:-1], "-o", "json"
    )
    gpus = [str(worker["gpu"]["index"]) for worker in json.loads(plan.stdout)["workers"]]
    assert {one["devices"] for one in told} == {",".join(gpus)}
    assert {one["WORLD_SIZE"] for one in told} == {"3"}


def test_ranks_of_mpi_of_two_programs_meet_and_know_their_program():
    pytest.importorskip("mpi4py", reason="scripts/setup.sh --tests installs mpi4py and MPICH")
    command = [*python(MPI, "t"), ":", *python(MPI, "r")]
    said = run(*start(*programs(trainer=1, rollout=3)), "--", *command)
    assert lines(said) == sorted(["t 0 4 0 1 15", *(f"r {rank} 4 1 3 15" for rank in (1, 2, 3))])


def test_a_spec_has_the_programs_and_ps_logs_and_lines_name_them(tmp_path):
    spec = tmp_path / "job.yaml"
    wait = "echo begun; while [ ! -e enough ]; do sleep 0.1; done"
    argv = json.dumps(["sh", "-c", wait])
    text = f"{{name: trainer, workers: 1, argv: {argv}}}, {{name: rollout, workers: 1, argv: {argv}}}"
    spec.write_text(f"version: 1\ncommand: {{programs: [{text}]}}\n")
    began = [*start("--prefix", "--name", "named"), "-f", str(spec)]
    with subprocess.Popen(began, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        said = {running.stdout.readline() for _ in range(2)}
        table = run(BUILT, "ps", "named")
        state = run(BUILT, "ps", "named", "-o", "json").stdout
        logs = run(BUILT, "logs", "named").stdout.splitlines()
        of_python = [one.program for one in cuda_cluster.attach("named").state().workers]
        (tmp_path / "enough").touch()
    assert running.returncode == 0
    assert said == {"[trainer:gpu0] begun\n", "[rollout:gpu1] begun\n"}
    assert re.search(r"^WORKER +PROGRAM", table.stdout, re.M), table
    assert re.search(r"^gpu1 +rollout", table.stdout, re.M), table
    assert [one["program"] for one in json.loads(state)["workers"]] == ["trainer", "rollout"]
    assert of_python == ["trainer", "rollout"]
    assert sorted(logs) == ["rollout:gpu1 begun", "trainer:gpu0 begun"], logs


def test_a_rank_that_fails_ends_both_programs_and_is_named_with_its_own():
    fails = ["sh", "-c", 'test "$ROLE_RANK" = 1 && exit 7; exec sleep 600']
    flags = [*programs(trainer=2, rollout=2), "--name", "one-fails"]
    said = run(*start(*flags), "--", "sleep", "600", ":", *fails)
    forget("one-fails")
    assert said.returncode == 7, said.stderr
    assert "run: rank 3 (rollout): gpu3 ended with status 7" in said.stderr


def test_both_programs_start_again_together():
    script = """
        test "$TORCHELASTIC_RESTART_COUNT" = 1 && exec echo "$RANK $ROLE_NAME $ROLE_RANK"
        # When all are READY.
        test "$RANK" = 2 && sleep 1 && kill -9 $$
        exec sleep 600
    """
    again = ["sh", "-c", script]
    flags = [*programs(trainer=2, rollout=1), "--restarts", "1", "--name", "both"]
    said = run(*start(*flags), "--", *again, ":", *again)
    forget("both")
    assert lines(said) == ["0 trainer 0", "1 trainer 1", "2 rollout 0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*programs(a=1, b=1), "--", "x"], "--program: 2 programs (a, b), and 1 command after --"),
        ([*programs(a=1), "--", "x", ":", "y"], "1 program (a), and 2 commands after --"),
        ([*programs(a=1, b=1)], "there is no command for the program a"),
        ([*programs(a=1, b=1), "--", "x", ":"], "there is no program in it"),
        ([*programs(a=1, b=1), "-n", "3", "--", "x", ":", "y"], "have 2 ranks together, and 3 are asked for"),
        ([*programs(a=5, b=5), "--", "x", ":", "y"], "10"),
        ([*programs(a=0), "--", "x"], "a has no rank"),
        (["--program", "a", "--", "x"], "no program with its ranks, like trainer=4"),
        (["--program", "a=x", "--", "x"], "not a whole number"),
        (["--program", "a=1", "--program", "a=1", "--", "x", ":", "y"], "two programs are called a"),
        (["--program", "a b=1", "--", "x"], "is no name of a program"),
        (
            [*programs(a=1, b=1), "--warm", "json", "--", "python", "x", ":", "python", "y"],
            "one process imports for all ranks",
        ),
        (["-n", "2", "--stdin", "2", "--", "x"], "there is no rank 2; the job has 2"),
        (["-n", "2", "--stdin", "all", "--", "x"], "or 'none'"),
        (["-n", "2", "--stdin", "0", "--restarts", "1", "--", "x"], "what a rank has read before a restart"),
        (["-n", "2", "--stdin", "0", "-f", "-", "--", "x"], "the spec is read from standard input"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_starts(arguments, words):
    said = run(*start(), *arguments, input="version: 1\n")
    assert said.returncode == 2, said.stdout + said.stderr
    assert words in said.stderr, said.stderr


def test_another_launchers_ranks_have_no_programs_of_ours():
    said = run(BUILT, "exec", "--rank", "0", *programs(a=1), "--", "true")
    assert said.returncode == 2 and "the launcher says what each rank runs" in said.stderr


def test_only_the_rank_that_is_named_reads_standard_input():
    said = run(*start("-n", "2", "--stdin", "1", "--prefix"), "--", "cat", input="a\nb\n")
    assert lines(said) == ["[gpu1] a", "[gpu1] b"]
    assert lines(run(*start("-n", "2"), "--", "cat", input="a\n")) == []
    assert lines(run(*start("-n", "2", "--stdin", "none"), "--", "cat", input="a\n")) == []


def test_a_file_is_the_ranks_own_and_so_is_what_it_leaves(tmp_path):
    (tmp_path / "input").write_text("a\nb\nc\n")
    one = [sys.executable, "-c", "import os; os.write(1, os.read(0, 2)); os.lseek(0, 4, 0)"]
    with open(tmp_path / "input") as file:
        assert lines(run(*start("-n", "1", "--stdin", "0"), "--", *one, stdin=file)) == ["a"]
        assert os.read(file.fileno(), 10) == b"c\n"


def test_a_writer_learns_that_the_rank_does_not_read_any_more():
    reader = ["sh", "-c", "if [ $RANK = 0 ]; then head -n 1; else exec sleep 600; fi"]
    command = [*start("-n", "2", "--stdin", "0", "--name", "reader"), "--", *reader]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        running.stdin.write("first\n")
        running.stdin.flush()
        assert running.stdout.readline() == "first\n"

        def is_broken():
            try:
                os.write(running.stdin.fileno(), b"more\n")
            except BrokenPipeError:
                return True
            return False

        eventually(is_broken, "the pipe has no reader")
        running.send_signal(signal.SIGINT)
        running.wait(60)
    assert running.returncode == 128 + signal.SIGINT


def test_a_forked_rank_that_reads_standard_input_is_executed():
    program = [
        "python",
        "-c",
        "import os, sys; os.write(1, (os.environ['RANK'] + sys.stdin.read() + '\\n').encode())",
    ]
    said = run(*start("-n", "2", "--stdin", "0", "--warm", "json"), "--", *program, input="x")
    assert lines(said) == ["0x", "1"]


def terminal(*command, typed):
    """What a command writes that is started in a terminal of its own, where this is typed."""
    process, end = pty.fork()
    if process == 0:
        os.execv(command[0], command)
    said = b""
    for when, keys in typed:
        while when not in said:
            said += os.read(end, 1024)
        os.write(end, keys)
    try:
        while more := os.read(end, 1024):
            said += more
    except OSError:
        pass  # The other end of a terminal is closed.
    _, status = os.waitpid(process, 0)
    os.close(end)
    return os.waitstatus_to_exitcode(status), said.decode().replace("\r", "")


def test_what_is_typed_reaches_the_rank_and_ctrl_d_is_the_end():
    ask = ["sh", "-c", "test $RANK = 1 || exit 0; echo name?; read a; echo got $a; cat; echo end"]
    typed = [(b"name?", b"mine\n"), (b"got mine", b"more\n"), (b"more", b"\x04")]
    code, said = terminal(*start("-n", "2", "--stdin", "1"), "--", *ask, typed=typed)
    assert code == 0, said
    assert "got mine\n" in said and said.endswith("end\n"), said
    assert said.count("more\n") == 2, "typed, and written by the rank"


def test_in_the_background_of_a_terminal_ranks_go_on_and_input_waits(tmp_path):
    ranks = "sh -c 'if [ $RANK = 0 ]; then read a; echo got $a; else echo works; fi'"
    job = " ".join([*start("-n", "2", "--stdin", "0"), "--", ranks])
    script = f"""
        set -m; cd {tmp_path}
        {job} > out & for try in $(seq 300); do grep -q works out && break; sleep 0.1; done
        grep -q works out && echo relayed; fg; cat out
    """
    code, said = terminal("/bin/bash", "-c", script, typed=[(b"relayed", b"late\n")])
    assert code == 0, said
    assert "got late" in said, said
