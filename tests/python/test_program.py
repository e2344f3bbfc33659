"""`cuda_cluster`: the program's JSON as objects, for any engine."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import cuda_cluster
import pytest
from conftest import MACHINE, ROOT, eventually, others
from cuda_cluster import program

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_machine_is_objects_with_the_names_of_the_json():
    machine = cuda_cluster.topology("dgx-h100")
    assert [gpu.index for gpu in machine.gpus] == list(range(8))
    assert machine.gpus[0].cpus == machine.json["gpus"][0]["cpus"]
    assert machine.nics[0].ports[0].port == 1
    kinds = {link.kind for link in machine.links if {link.a, link.b} == {"GPU0", "GPU1"}}
    assert kinds == {"NV18"}
    assert cuda_cluster.topology().numa, "this machine has a NUMA node"


def test_a_plan_says_what_would_run_and_why():
    plan = cuda_cluster.plan(topology="dgx-1-v100", enable_nvlink=True, n_workers=4)
    assert (list(plan.engine), len(plan.workers)) == (["native"], 4)
    worker = plan.workers[0]
    assert worker.env["UCX_TLS"] == plan.json["workers"][0]["env"]["UCX_TLS"]
    assert {why.choice for why in worker.why} >= {"gpu", "cpus"}
    by_spec = cuda_cluster.plan(topology="dgx-1-v100", spec={"workers": 2, "threads": 3})
    assert [one.threads for one in by_spec.workers] == [3, 3]
    # Only what is written in a file has variables put in.
    spec = {"workers": 1, "worker": {"env": {"A": "${B} $$ $C"}}}
    [worker] = cuda_cluster.plan(topology="dgx-1-v100", spec=spec).workers
    assert worker.env["A"] == "${B} $$ $C"


def test_specs_are_merged_in_their_order_and_paths_in_a_mapping_are_of_this_directory(tmp_path):
    file = tmp_path / "base.yaml"
    file.write_text("version: 1\nengine: dask\nworkers: 1\nthreads: 2\nworker: {local_directory: beside}\n")
    above = {"threads": 3, "dask": {"preload": ["own.py"]}}
    plan = cuda_cluster.plan(topology="dgx-1-v100", spec=[file, above, {"workers": 2}])
    assert [worker.threads for worker in plan.workers] == [3, 3]
    dask = plan.engine["dask"]
    assert dask["local_directory"] == str(tmp_path / "beside")
    assert dask["preload"] == [os.path.abspath("own.py")]
    with pytest.raises(ValueError, match="^spec: thread: unknown key"):
        cuda_cluster.up(spec={"thread": 3})


def test_a_cluster_of_the_native_engine_is_brought_up_watched_and_taken_down():
    with cuda_cluster.up(**MACHINE, n_workers=2, name="native") as cluster:
        state = cluster.state(wide=True)
        assert (state.state, state.engine, cluster.name) == ("ready", "native", "native")
        assert [worker.name for worker in state.workers] == ["gpu0", "gpu1"]
        assert state.workers[0].resident_bytes > 1 << 20
        assert cluster.plan().workers[1].gpu.index == state.workers[1].gpu.index
        assert cluster.logs("gpu0", tail=1)
        with pytest.raises(cuda_cluster.ClusterError, match="the supervisor refused.*gpu 9&x"):
            cluster.logs("gpu 9&x")
        assert cuda_cluster.attach("native").state().supervisor_pid == state.supervisor_pid
        events = cluster.events()
        cluster.restart("gpu1")
        assert next(one for one in events if one.event == "ready").process == "gpu1"
        cluster.scale(1)
        assert next(one for one in events if one.event == "stopping").process == "gpu1"
    assert any("simulation" in note for note in cluster.notes)
    # A stream of events ends with the cluster.
    assert list(events)[-1].event in ("cluster", "exited")


def test_what_is_wrong_is_raised_in_the_programs_words():
    with pytest.raises(cuda_cluster.WrongInput, match="99 GPUs are asked for") as wrong:
        cuda_cluster.up(**MACHINE, n_workers=99)
    assert wrong.value.exit_code == 2 and "ask for fewer" in wrong.value.hint
    with pytest.raises(ValueError, match="--simulate"):
        cuda_cluster.plan(simulates=True)
    with pytest.raises(cuda_cluster.ClusterError, match="dgx-h1oo"):
        cuda_cluster.topology("dgx-h1oo")
    with pytest.raises(cuda_cluster.ClusterError, match="no cluster"):
        cuda_cluster.attach("nobody")


def test_a_worker_that_cannot_start_is_raised_with_its_cause():
    with pytest.raises(cuda_cluster.ClusterError, match="cannot import no_such_module"):
        cuda_cluster.up(**MACHINE, engine="dask", python=sys.executable, n_workers=1,
                        pre_import="no_such_module")  # fmt: skip


def test_a_missing_program_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_CLUSTER_BIN", str(tmp_path / "none"))
    with pytest.raises(cuda_cluster.ProgramNotFound, match="CUDA_CLUSTER_BIN"):
        cuda_cluster.topology()


@pytest.mark.parametrize("end", ["exit", "kill", "fork"])
def test_a_cluster_ends_with_its_python_however_that_ends(end, tmp_path):
    """`fork`: a child of the Python lives on, and holds every pipe that it had."""
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, time, cuda_cluster
            cluster = cuda_cluster.up(**{MACHINE!r}, n_workers=1, name="owned")
            if {end == "fork"} and os.fork() == 0:
                time.sleep(600)
            print(os.getpid() if os.getppid() else 0, flush=True)
            if {end != "exit"}:
                time.sleep(600)
            """
        )
    )
    owner = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True,
                             start_new_session=True)  # fmt: skip
    try:
        assert owner.stdout.readline().strip() == str(owner.pid)
        if end == "exit":
            assert owner.wait(60) == 0
        else:
            owner.kill()
            owner.wait()
        supervised = lambda: [one for one in others() if "__" in one[1] or " up " in one[1]]
        eventually(lambda: not supervised(), "the cluster has ended")
    finally:
        try:
            os.killpg(owner.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_ctrl_c_is_for_the_python_program_and_not_for_its_cluster():
    with cuda_cluster.up(**MACHINE, n_workers=1, name="kept") as cluster:
        pid = cluster.state().supervisor_pid
        assert os.getsid(pid) != os.getsid(0)
        up = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        assert os.getpgid(up) != os.getpgrp()


def test_every_flag_of_the_program_can_be_a_keyword():
    shown = program.run(["up", "--help"])
    flags = set(re.findall(r"^\s+(?:-\w, )?--([a-z-]+)", shown, re.MULTILINE))
    from cuda_cluster.dask import keywords

    about_programs = {"help", "output", "owner", "detach", "dry-run", "plan", "file", "preflight", "verbose"}
    own = {"engine", "python", "join", "host", "interface", "scheduler-port", "threads-per-worker",
           "tls-ca-file", "tls-cert", "tls-key", "n-workers", "memory-limit", "device-memory-limit",
           "set-rmm-allocator-for-libs", "dashboard", "no-dashboard", "dashboard-address",
           "resources", "worker-class", "preload", "pre-import", "name", "protocol",
           "local-directory"}  # fmt: skip
    known = {name.replace("_", "-") for name in (*keywords.FLAGS, *keywords.DASK_CUDA)}
    opposites = {flag.replace("disable-", "enable-") for flag in flags if "disable" in flag}
    missing = flags - known - own - about_programs - {f for f in flags if f.startswith("disable-")}
    assert missing - opposites == set(), "LocalCUDACluster does not know these flags"


@pytest.mark.parametrize("kind, code", [("int | None", 0), ("str", 1)])
def test_a_users_program_is_checked_against_the_packages_types(kind, code, tmp_path):
    assert (Path(cuda_cluster.__file__).parent / "py.typed").exists()
    (tmp_path / "program.py").write_text(
        f"import cuda_cluster\nwith cuda_cluster.up(n_workers=2) as cluster:\n"
        f"    pid: {kind} = cluster.state().workers[0].pid\n"
    )
    env = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert code == 0 or 'type "int | None", variable has type "str"' in done.stdout


def test_the_package_does_without_dask_until_it_is_asked_for():
    loaded = "import cuda_cluster, sys; print('distributed' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True)
    assert said.stdout.strip() == "False", said
