"""Checks under masks of GPUs: whoever starts a process, every one of its threads has the CPUs, the memory
and the NIC of the GPU that it is given, in the mask's order. Masks are shuffled numbers, shuffled UUIDs,
and MIG instances. What was bound is the kernel's word, from outside of the process."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile

import machine
from guest import (ENVIRONMENT, LIMIT, MADE_UP, RDMA, Table, Wrong, as_planned, bound, eventually, mappings,
                   needs, prepare, program, state, up)  # fmt: skip
from machine import GPUS

table = Table()
check = table.check

#: What each thread of a worker writes to.
TOUCHED = 4 << 20
THREADS = 6
PAGES = THREADS * TOUCHED // os.sysconf("SC_PAGE_SIZE")

#: A worker with threads of its own, which says who it is once all of them have touched their memory.
#: `bind` binds it at its first line, with a pool of threads that is there already.
WORKER = f"""
import json, mmap, os, pathlib, sys, threading
here = threading.Barrier({THREADS + 1})
def work():
    mine = mmap.mmap(-1, {TOUCHED}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mine.write(bytes([1]) * {TOUCHED})
    here.wait()
    threading.Event().wait()
if sys.argv[1:] == ["bind"]:
    for _ in range(3):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    import cuda_cluster
    cuda_cluster.bind(enable_infiniband=True, net_devices="auto")
for _ in range({THREADS}):
    threading.Thread(target=work, daemon=True).start()
here.wait()
names = ("MEMBER", "RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "UCX_NET_DEVICES", "NCCL_IB_HCA")
said = pathlib.Path(os.environ["FOLDER"], str(os.getpid()))
said.with_suffix(".part").write_text(json.dumps({{name: os.environ.get(name, "") for name in names}}))
said.with_suffix(".part").rename(said)
threading.Event().wait()
"""


def instances(gpu, count):
    """UUIDs of a GPU's MIG instances."""
    return [f"MIG-00000000-0000-4000-8000-{int(gpu.name[3:]):06}{at:06}" for at in range(count)]


#: GPUs in MIG mode in the description with instances, and how many each has.
IN_MIG = {GPUS[2]: 2, GPUS[5]: 3}


def description_with_instances():
    """The made-up machine, two of whose GPUs are in MIG mode."""
    described = machine.gpus()
    for gpu, count in IN_MIG.items():
        one = described["gpus"][GPUS.index(gpu)]
        one["mig_mode"] = True
        one["mig"] = [{"uuid": uuid, "profile": "1g.5gb", "memory_bytes": one["memory_bytes"] // 8}
                      for uuid in instances(gpu, count)]  # fmt: skip
    path = MADE_UP / "with-mig.json"
    path.write_text(json.dumps(described))
    return {"CUDA_CLUSTER_FAKE_NVML": str(path)}


def masks():
    """Each mask's kind, what it names in order with the GPU, and what the machine's description is."""
    order = random.Random(5)
    shuffled = lambda things: order.sample(things, len(things))
    yield "numbers", [(str(GPUS.index(gpu)), gpu) for gpu in shuffled(GPUS)], {}
    yield "UUIDs of six", [(machine.uuid(gpu), gpu) for gpu in shuffled(GPUS)[:6]], {}
    of_mig = [(uuid, gpu) for gpu, count in IN_MIG.items() for uuid in instances(gpu, count)]
    whole = [(machine.uuid(gpu), gpu) for gpu in GPUS if gpu not in IN_MIG]
    yield "MIG instances", shuffled(of_mig), description_with_instances()
    yield "MIG instances and GPUs", shuffled(of_mig[::2] + whole[:3]), description_with_instances()


def text(mask):
    return ",".join(name for name, _ in mask)


def nearest(gpu):
    """The ports whose NICs are as near as any."""
    least = min(machine.distance(gpu, nic) for nic in machine.NICS)
    return {f"{machine.roce(nic)}:1" for nic in machine.NICS if machine.distance(gpu, nic) == least}


def planned(mask):
    """What is expected of each member of a mask: CPUs, policy, NIC, pages."""
    return {at: [name, *as_planned(gpu), "a nearest port", "0 pages elsewhere"]
            for at, (name, gpu) in enumerate(mask)}  # fmt: skip


def port_of(variables):
    """The port that UCX may use, of a process with these variables."""
    return variables.get("UCX_NET_DEVICES", "").split(",")[0]


def judged_port(gpu, port):
    """A port, in the words of `planned`."""
    return "a nearest port" if port in nearest(gpu) else f"{port or 'none'}, not of {nearest(gpu)}"


def environment(pid):
    """The variables with which a process has begun."""
    entries = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def judged(pid, gpu, name, port, born):
    """What the kernel says of a process, in the words of `planned`."""
    nodes = machine.memory(gpu)
    pages = mappings(pid)[1]
    near = sum(count for node, count in pages.items() if node in nodes)
    away = sum(pages.values()) - near
    if near < PAGES:
        raise Wrong(f"{name}: only {near} of the {PAGES} pages that its threads have touched are near")
    # What Python had touched before it called `bind` stays where it is.
    return [name, *bound(pid), judged_port(gpu, port), f"{away if born else 0} pages elsewhere"]


@contextlib.contextmanager
def started(commands, count):
    """What the processes of commands say of themselves, by their ids, once there are so many. Each command
    has variables of its own."""
    folder = pathlib.Path(tempfile.mkdtemp())
    log = open(folder / "log.part", "w+")
    running = []
    try:
        for command, variables in commands:
            env = {**ENVIRONMENT, "FOLDER": str(folder), **variables}
            running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

        def said():
            files = [path for path in folder.iterdir() if not path.suffix]
            return {int(path.name): json.loads(path.read_text()) for path in files}

        ended = lambda: any(one.poll() is not None for one in running)
        found = eventually(said, lambda seen: len(seen) == count or ended(), LIMIT)
        if len(found) != count:
            log.seek(0)
            raise Wrong(f"{len(found)} of {count} have said who they are: {log.read()[-600:]}")
        yield found
    finally:
        for one in running:
            one.terminate()
        for one in running:
            one.wait()
        log.close()
        shutil.rmtree(folder)


def seen_of(commands, mask, born=True):
    """What is seen of the members of a mask that commands start."""
    with started(commands, len(mask)) as processes:
        found = {}
        for pid, said in processes.items():
            at = int(said["MEMBER"] or said["RANK"])
            gpu = mask[at][1]
            visible = said["CUDA_VISIBLE_DEVICES"].split(",")
            # Of all it takes the one of its local rank; one that does not see all has its own first.
            taken = visible[int(said["LOCAL_RANK"]) if 1 < len(visible) == len(mask) else 0]
            port = port_of(said)
            if port not in said["NCCL_IB_HCA"].lstrip("=").split(","):
                port += f" for UCX, {said['NCCL_IB_HCA']} for NCCL"
            found[at] = judged(pid, gpu, taken, port, born)
        return dict(sorted(found.items()))


BOUND = ["--cpus=local", "--memory-policy=preferred"]
FLAGS = [*BOUND, *RDMA]
OURS = "/lab/cuda-cluster"


def ranks(kind, mask, described):
    """`run`, which starts one rank for each entry."""
    command = [OURS, "run", *FLAGS, "--", "python3", "-c", WORKER]
    variables = {"CUDA_VISIBLE_DEVICES": text(mask), **described}
    check(f"run, {kind} ({text(mask)}): each rank is the mask's entry, and bound",
          planned(mask), lambda: seen_of([(command, variables)], mask))  # fmt: skip


def pool_of_one_each(kind, mask, described):
    """A pool that gives each process its GPU alone, as Ray does."""
    command = [OURS, "exec", "--gpu=auto", *FLAGS, "--", "python3", "-c", WORKER]
    commands = [(command, {"MEMBER": str(at), "CUDA_VISIBLE_DEVICES": name, **described})
                for at, (name, _) in enumerate(mask)]  # fmt: skip
    check(f"exec --gpu auto in a pool that gives one of {kind} to each", planned(mask),
          lambda: seen_of(commands, mask))  # fmt: skip


def launcher_with_all(kind, mask, described):
    """A launcher that gives all processes the same mask and each its local rank, as torchrun does."""
    command = [OURS, "exec", "--gpu=auto", *FLAGS, "--", "python3", "-c", WORKER]
    size = str(len(mask))
    commands = [(command, {"MEMBER": str(at), "CUDA_VISIBLE_DEVICES": text(mask), "LOCAL_RANK": str(at),
                           "RANK": str(at), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **described})
                for at in range(len(mask))]  # fmt: skip
    check(f"exec --gpu auto under a launcher that gives {kind} to all, and local ranks", planned(mask),
          lambda: seen_of(commands, mask))  # fmt: skip


def first_line(kind, mask, described):
    """`bind()` as the first line of a process of somebody else's pool."""
    command = ["python3", "-c", WORKER, "bind"]
    config = {"PYTHONPATH": "/lab/python", "CUDA_CLUSTER_BIN": OURS}
    commands = [(command, {"MEMBER": str(at), "CUDA_VISIBLE_DEVICES": name, **config, **described})
                for at, (name, _) in enumerate(mask)]  # fmt: skip
    check(f"cuda_cluster.bind() in a pool that gives one of {kind} to each: all threads", planned(mask),
          lambda: seen_of(commands, mask, born=False))  # fmt: skip


def workers(engine, flags, kind, mask, described, **more):
    """The workers of an engine, in the mask's order."""
    is_told = "--net-devices" in flags
    variables = {"CUDA_VISIBLE_DEVICES": text(mask), **described, **more}
    with up("--engine", engine, *flags, **variables):
        found = state()["workers"]
        check(f"up --engine {engine}, {kind}: every thread of every worker is bound",
              {at: [*as_planned(gpu), "a nearest port" if is_told else ""] for at, (_, gpu) in enumerate(mask)},
              lambda: {at: [*bound(one["pid"]), judged_port(mask[at][1], port_of(environment(one["pid"])))
                            if is_told else port_of(environment(one["pid"]))]
                       for at, one in enumerate(found)})  # fmt: skip
        check(f"up --engine {engine}, {kind}: the GPUs are the mask's, in its order", [gpu.place for _, gpu in mask],
              [one["gpu"]["pci"] for one in found])  # fmt: skip


def native(kind, mask, described):
    workers("native", FLAGS, kind, mask, described)


def dask(kind, mask, described):
    if not pathlib.Path("/lab/dask/distributed").exists():
        table.not_run(f"up --engine dask, {kind}", "there is no Dask in .venv: scripts/setup.sh --tests")
        return
    # Over TCP, as nothing is installed there: no NIC is planned then.
    workers("dask", [*BOUND, "--protocol", "tcp"], kind, mask[:3], described,
            PYTHONPATH="/lab/python:/lab/dask", DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT="300s")  # fmt: skip


def balance():
    """Of equally near NICs each serves as many, also in a mask's order."""
    for kind, mask, described in masks():
        command = ["plan", *RDMA, "-o", "json"]
        variables = {"CUDA_VISIBLE_DEVICES": text(mask), **described}

        def served(command=command, variables=variables):
            found = needs(program(*command, **variables)).json()["workers"]
            return [one["nics"][0] for one in found]

        def even(ports, mask=mask):
            """equally near NICs serve as many, give or take one"""
            # Each NIC's number of GPUs, those included that have no choice.
            counts = [[ports.count(port) for port in nearest(gpu)] for _, gpu in mask]
            return all(max(each) - min(each) <= 1 for each in counts)

        check(f"plan, {kind}: {even.__doc__}", even, served)


def every(way):
    """A part of the suite: one way of starting processes under all masks."""

    def part():
        for kind, mask, described in masks():
            way(kind, mask, described)

    part.__name__ = way.__name__
    return part


PARTS = [balance, *map(every, (ranks, pool_of_one_each, launcher_with_all, first_line, native, dask))]

if __name__ == "__main__":
    prepare()
    table.run(PARTS)
