"""A process that somebody else has started binds itself by its GPU, as the kernel says from outside."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import cuda_cluster
import pytest
from halves import cpus_of, half, made, nic, policy_of, text, uuid

pytestmark = pytest.mark.usefixtures("nothing_is_left")

MIG = "MIG-00000000-0000-4000-8000-00000000000"

#: Two threads are born before, one after; then it waits to be looked at. Arguments: what goes before
#: `bind`, and its keywords, for one `bind` after the other.
WORKER = """
    import dataclasses, json, os, sys, threading
    import cuda_cluster
    waits = lambda: threading.Thread(target=threading.Event().wait, daemon=True).start()
    waits(), waits()
    exec(sys.argv[1])
    for keywords in map(json.loads, sys.argv[2:]):
        try:
            said = dataclasses.asdict(cuda_cluster.bind(**keywords))
        except cuda_cluster.ClusterError as error:
            said = {"error": str(error), "kind": type(error).__name__, "code": error.exit_code}
        waits()
        said["environ"] = dict(os.environ)
        print(json.dumps(said), flush=True)
        if not sys.stdin.readline():
            break
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    return lambda *change: made(tmp_path_factory.mktemp("machine"), *change)


@pytest.fixture(scope="module")
def machine(machines):
    return machines()


class Worker:
    """A process that binds itself, once for each set of keywords."""

    def __init__(self, machine, *keywords, begin="", cpus=None, **variables):
        taskset = [] if cpus is None else ["taskset", "-c", cpus]
        python = [sys.executable, "-c", textwrap.dedent(WORKER), begin]
        self.process = subprocess.Popen(
            [*taskset, *python, *map(json.dumps, keywords or ({},))],
            env={**os.environ, **machine, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def said(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def again(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.communicate()


def bound(machine, **asked):
    """What one says that is bound, once it has been compared with what the kernel says."""
    with Worker(machine, **asked) as worker:
        said = worker.said()
        assert "error" not in said, said["error"]
        assert cpus_of(worker.process.pid) == {said["cpus"]}
        assert len(list(Path(f"/proc/{worker.process.pid}/task").iterdir())) >= 4
        assert said["threads"] >= 3
        assert said["mems"] in policy_of(worker.process.pid), policy_of(worker.process.pid)
        return said


def refused(machine, *keywords, **asked):
    """The message of one that is not bound, once the kernel has said that nothing has changed."""
    with Worker(machine, *keywords, **asked) as worker:
        said = worker.said()
        assert said["kind"] == "NotBound", said
        before = asked.get("cpus") or text(os.sched_getaffinity(0))
        assert cpus_of(worker.process.pid) == {before}
        assert policy_of(worker.process.pid) == "default"
        assert not [name for name in said["environ"] if name.startswith(("UCX_", "NCCL_"))]
        return said["error"]


@pytest.mark.parametrize(
    ("variables", "gpu"),
    [
        ({"CUDA_VISIBLE_DEVICES": "5"}, 5),
        ({"CUDA_VISIBLE_DEVICES": uuid(6)}, 6),
        ({"CUDA_VISIBLE_DEVICES": uuid(3)}, 3),
        ({"CUDA_VISIBLE_DEVICES": "7,4,0,3", "LOCAL_RANK": "1"}, 4),
        ({"CUDA_VISIBLE_DEVICES": f"{uuid(1)},{uuid(5)}", "SLURM_LOCALID": "1"}, 5),
        ({"LOCAL_RANK": "6"}, 6),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
    ],
)
def test_the_gpu_is_that_of_the_variables(machine, variables, gpu):
    said = bound(machine, **variables)
    assert (said["worker"], said["gpu"]["index"]) == (f"gpu{gpu}", gpu)
    assert said["cpus"] == half(gpu)
    assert said["memory_policy"] == "preferred"


def test_what_the_caller_names_is_bound(machine):
    for keywords, gpu in [
        ({"gpu": 6}, 6),
        ({"gpu": uuid(1)}, 1),
        ({"device": 3}, 3),
    ]:
        with Worker(machine, keywords, CUDA_VISIBLE_DEVICES="") as worker:
            said = worker.said()
            if "device" in keywords:
                assert "does not tell the GPU" in said["error"]
            else:
                assert (said["worker"], cpus_of(worker.process.pid)) == (f"gpu{gpu}", {half(gpu)})
    for mask, device, gpu in [("5,1", 1, 1), ("6", 0, 6), (f"{uuid(5)},{uuid(0)}", 0, 5)]:
        # Of a launcher's rank, which is not this process's, nothing is said.
        with Worker(machine, {"device": device}, CUDA_VISIBLE_DEVICES=mask, SLURM_LOCALID="9") as worker:
            said = worker.said()
            assert said["worker"] == f"gpu{gpu}", said
            assert "RANK" not in said["environ"]


def test_the_only_gpu_needs_no_variable(machines):
    assert bound(machines(lambda gpus: gpus[7:]))["cpus"] == half(7)


def test_an_instance_of_a_gpu_is_bound_as_its_gpu(machines):
    def divided(gpus):
        instance = {"profile": "3g.20gb", "memory_bytes": 20 << 30}
        gpus[5] |= {"mig_mode": True, "mig": [{"uuid": MIG + str(at), **instance} for at in range(2)]}
        return gpus

    said = bound(machines(divided), CUDA_VISIBLE_DEVICES=MIG + "1")
    assert (said["gpu"]["uuid"], said["cpus"]) == (MIG + "1", half(7))


def test_the_nic_of_the_gpu_is_in_the_variables_unless_somebody_has_set_them(machine):
    flags = {"enable_infiniband": True}
    for gpu in (1, 6):
        with Worker(machine, flags, CUDA_VISIBLE_DEVICES=str(gpu), NCCL_IB_HCA="mine") as worker:
            said = worker.said()
        assert said["nics"] == [nic(gpu)]
        assert said["environ"]["UCX_NET_DEVICES"] == said["env"]["UCX_NET_DEVICES"]
        assert nic(gpu) in said["env"]["UCX_NET_DEVICES"]
        assert said["environ"]["NCCL_IB_HCA"] == "mine"
        assert said["environ"]["CUDA_VISIBLE_DEVICES"] == str(gpu)
    with Worker(machine, flags, CUDA_VISIBLE_DEVICES="1", UCX_NET_DEVICES="lo") as worker:
        assert worker.said()["environ"]["UCX_NET_DEVICES"] == "lo"


def test_a_mask_that_is_narrower_than_the_plan_stays(machine):
    cpus = sorted(os.sched_getaffinity(0))
    one = str(cpus[-1])
    said = bound(machine, cpus=one, CUDA_VISIBLE_DEVICES="7")
    assert said["cpus"] == one
    # None of its CPUs is near this GPU; nobody gets CPUs that were taken from him.
    assert bound(machine, cpus=one, CUDA_VISIBLE_DEVICES="0")["cpus"] == one


def test_a_process_that_gets_another_gpu_is_bound_again(machine):
    keywords = [{"gpu": gpu, "enable_infiniband": True} for gpu in (0, 7, 1)]
    with Worker(machine, *keywords) as worker:
        for gpu in (0, 7, 1):
            said = worker.said()
            assert (said["worker"], cpus_of(worker.process.pid)) == (f"gpu{gpu}", {half(gpu)})
            assert said["nics"] == [nic(gpu)]
            assert said["environ"]["UCX_NET_DEVICES"].startswith(nic(gpu))
            assert said["environ"]["CUDA_VISIBLE_DEVICES"].startswith(str(gpu))
            worker.again()


CUDA = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
"""
INITIALISED = CUDA + "assert driver.cuInit(0) == 0"
CONTEXT = (
    INITIALISED
    + """
context = ctypes.c_void_p()
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
"""
)


def test_it_is_too_late_once_cuda_has_begun(machine):
    begun = "CUDA has begun in this process"
    assert begun in refused(machine, begin=CONTEXT, CUDA_VISIBLE_DEVICES="1")
    # Without a context nothing has a place yet; but what is visible has been read.
    assert "CUDA_VISIBLE_DEVICES can't be set" in refused(machine, {"gpu": 1}, begin=INITIALISED)
    for begin in (CUDA, INITIALISED):
        assert bound(machine, begin=begin, CUDA_VISIBLE_DEVICES="1")["worker"] == "gpu1"


def test_a_process_without_a_gpu_is_told_why(machine, machines):
    for keywords, variables, why in [
        ({}, {"CUDA_VISIBLE_DEVICES": "9"}, 'no worker for the GPU "9"'),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "does not tell the GPU"),
        ({}, {"CUDA_VISIBLE_DEVICES": "1,2"}, "no launcher says a rank\nhint: bind(gpu=3), or its UUID"),
        ({}, {}, "no variable tells this process its rank on this machine\nhint: bind(device=N)"),
        ({"gpu": 9}, {}, 'no worker for the GPU "9"'),
        ({"gpu": 1, "device": 1}, {}, "two names of one choice"),
        ({"device": 2}, {"CUDA_VISIBLE_DEVICES": "1,2"}, "the local rank is 2"),
    ]:
        assert why in refused(machine, keywords, **variables), (keywords, variables)
    none = {**machine, "CUDA_CLUSTER_NVML": "none"}
    assert "GPU" in refused(none, CUDA_VISIBLE_DEVICES="0")


def test_what_the_kernel_does_not_do_is_not_said_to_be(machine):
    lies = "os.sched_setaffinity = lambda *_: None"
    message = refused(machine, begin=lies, CUDA_VISIBLE_DEVICES="0")
    assert message.startswith(f"CPUs {half(0)} were asked for, ")
    refuses = "import cuda_cluster.binding as b; b._call = lambda *_: 1"
    with Worker(machine, {}, {"strict": True}, begin=refuses, CUDA_VISIBLE_DEVICES="0") as worker:
        said = worker.said()
        assert (said["memory_policy"], said["mems"]) == ("default", "")
        assert any("could not be set: Operation not permitted" in note for note in said["notes"])
        worker.again()
        assert "strict" in worker.said()["error"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pools_workers_bind_themselves_one_after_the_other(machine, method):
    """What `concurrent.futures` starts, whichever way; a forked worker has what its parent was."""
    program = """
        import dataclasses, json, multiprocessing, os, sys, cuda_cluster
        from concurrent.futures import ProcessPoolExecutor
        def begin(waiting):
            global bound
            bound = cuda_cluster.bind(gpu=waiting.get())
        def place(_):
            global bound
            return bound.gpu.index, sorted(os.sched_getaffinity(0))
        if __name__ == "__main__":
            cuda_cluster.bind(gpu=0)
            context = multiprocessing.get_context(sys.argv[1])
            waiting = context.Queue()
            for gpu in range(8): waiting.put(gpu)
            with ProcessPoolExecutor(8, context, begin, (waiting,)) as pool:
                places = {index: cpus for index, cpus in pool.map(place, range(200), chunksize=1)}
            print(json.dumps(places))
    """
    folder = Path(machine["CUDA_CLUSTER_SYSFS"]).parent
    (folder / "pool.py").write_text(textwrap.dedent(program))
    said = subprocess.run(
        [sys.executable, folder / "pool.py", method],
        env={**os.environ, **machine},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    for gpu, cpus in json.loads(said.stdout).items():
        near = half(int(gpu))
        # Only a forked one knows what its parent could use before that was bound.
        assert text(cpus) == (near if method == "fork" else half(0)), gpu


def test_the_programs_words_are_an_object():
    fields = {"worker", "gpu", "cpus", "mems", "memory_policy", "threads", "nics", "env", "kept", "notes"}
    assert set(asdict(cuda_cluster.Bound("gpu0", None, "0", "0", "bind", 1))) == fields
