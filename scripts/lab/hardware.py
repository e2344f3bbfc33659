"""Checks on a machine of several NUMA nodes with RDMA: what the program sees, plans, binds, opens,
notices and leaves behind. Expected values come from `machine`; what was seen comes from the kernel,
or from the program where its word is what is checked."""

import contextlib
import json
import os
import pathlib
import re
import signal

import machine
from guest import (CGROUPS, RDMA, Table, as_planned, bound, cable, containing, eventually, lanes,
                   mappings, needs, plan, prepare, processes, program, sh, state, sysfs, threads, up,
                   word, worker)  # fmt: skip
from machine import ALL_CPUS, DEVICES, GPUS, NICS, NODES, members, text

#: Two GPUs whose NICs differ.
PAIR = ["--gpus", "0,2"]
#: No shared memory, so that every message takes the NIC.
ONLY_RDMA = {"UCX_TLS": "rc,self"}
PORTS = {gpu.name: f"{machine.roce(nic)}:1" for gpu, nic in machine.nics().items()}

table = Table()
check = table.check


def seen():
    return needs(program("topo", "-o", "json")).json()


def places():
    """What the kernel says against the list, so that the rest compares like with like."""
    bus = pathlib.Path("/sys/bus/pci/devices")

    def ancestors(device):
        path = (bus / device.place).resolve()
        return [part for part in path.parts if re.match(r"pci|[0-9a-f]{4}:", part)][::-1][1:]

    below = [device for device in DEVICES if device.kind != "host"]
    check("lab: the kernel has every device under the bridges of the list",
          {d.name: [above.place for above in d.above] for d in below},
          lambda: {d.name: ancestors(d) for d in below})  # fmt: skip
    check("lab: the kernel has the CPUs and the memory of every node",
          {node: [text(cpus) or "-", bool(mib)] for node, (_, cpus, mib) in NODES.items()},
          lambda: {node: [sysfs(f"devices/system/node/node{node}/cpulist") or "-",
                          node in members(sysfs("devices/system/node/has_memory"))]
                   for node in NODES})  # fmt: skip


def topology():
    found = seen()
    check("topo: every host bridge, root port and switch port",
          {d.place: [d.kind, d.above[0].place if d.above else f"node {d.node}"] for d in DEVICES
           if d.kind not in ("gpu", "nic")},
          lambda: {b["id"]: [b["kind"], b.get("parent", f"node {b.get('numa')}")]
                   for b in found["bridges"]
                   if b["id"].removeprefix("pci").removeprefix("0000:")[:2] != "00"})  # fmt: skip
    check("topo: NUMA node and CPUs of every GPU",
          {d.name: [d.node, text(machine.cpus(d))] for d in GPUS},
          lambda: {f"gpu{g['index']}": [g["numa"], g["cpus"]] for g in found["gpus"]})  # fmt: skip
    check("topo: NUMA node, place and netdev of every NIC",
          {machine.roce(d): [d.node, d.place, cable(d)] for d in NICS},
          lambda: {n["name"]: [n["numa"], n["pci"], n["ports"][0]["netdev"]] for n in found["nics"]
                   if n["name"] != "soft0"})  # fmt: skip
    check("topo: CPUs, package and memory of every NUMA node",
          {node: [package, text(cpus), bool(mib)] for node, (package, cpus, mib) in NODES.items()},
          lambda: {n["id"]: [n.get("package"), n["cpus"] or "", bool(n["memory_bytes"])]
                   for n in found["numa"]})  # fmt: skip
    names = {f"GPU{at}": gpu for at, gpu in enumerate(GPUS)}
    names |= {f"NIC{at}": nic for at, nic in enumerate(NICS)}
    pairs = [(a, b) for a in names for b in names if a < b]
    check("topo: the link of every pair of GPUs and NICs",
          {f"{a}-{b}": machine.link(names[a], names[b]) for a, b in pairs},
          lambda: {f"{e['a']}-{e['b']}": e["kind"] for e in found["links"]
                   if {e["a"], e["b"]} <= set(names)})  # fmt: skip


def nics():
    planned = plan(*RDMA)
    check("plan: the NIC of every GPU is the nearest, and equally near ones serve as many", PORTS,
          lambda: {w["name"]: " ".join(w["nics"]) for w in planned["workers"]})  # fmt: skip
    check("plan: UCX_NET_DEVICES names it, and lo", {name: f"{port},lo" for name, port in PORTS.items()},
          lambda: {w["name"]: w["env"]["UCX_NET_DEVICES"] for w in planned["workers"]})  # fmt: skip
    check("plan: Soft-RoCE without a card is used if it is named", ["soft0:1"],
          lambda: plan("--gpus", 0, "--enable-infiniband", "--net-devices", "soft0:1")
          ["workers"][0]["nics"])  # fmt: skip


def preflight():
    """The machine has no fault but its driver, which is made up."""
    found = program("doctor", "-o", "json", *RDMA).json()["findings"]
    bad = {f"{one['id']} {one['about']}: {one['text']}" for one in found
           if one["severity"] in ("warning", "error")}  # fmt: skip
    made_up = ("cuda ", "device-files ", "ucx")
    check("doctor: nothing is wrong but the driver, which is made up", set(),
          lambda: {text for text in bad if not text.startswith(made_up)})  # fmt: skip
    check("doctor: what was looked at is more than half of the table", True,
          lambda: len({one["id"] for one in found}) > 45)  # fmt: skip


def bindings():
    for cpus, policy, gpus in (
        ("local", "preferred", GPUS),
        ("split", "bind", [GPUS[n] for n in (0, 1, 6, 7)]),
        ("none", "none", [GPUS[n] for n in (0, 7)]),
    ):
        flags = [f"--cpus={cpus}", f"--memory-policy={policy}"]
        what = f"up {' '.join(flags)}:"
        with up(*flags, "--gpus", ",".join(gpu.name[3:] for gpu in gpus)):
            found = state()
            pids = {w["name"]: w["pid"] for w in found["workers"]}
            of_threads = {name: sorted(threads(pid)) for name, pid in pids.items()}
            near = {gpu.name: ALL_CPUS if cpus == "none" else machine.cpus(gpu) for gpu in gpus}

            def shares(seen):
                """one set for all threads of a worker, within the near CPUs, and no CPU in two sets"""
                sets = {name: members(",".join(each)) for name, each in seen.items()}
                return (all(len(each) == 1 for each in seen.values())
                        and all(sets[name] and sets[name] <= near[name] for name in near)
                        and sum(map(len, sets.values())) == len(set().union(*sets.values())))  # fmt: skip

            whole = {name: [text(each)] for name, each in near.items()}
            check(f"{what} the CPUs of every thread of every worker",
                  shares if cpus == "split" else whole, of_threads)  # fmt: skip
            of_memory = {name: mappings(pid) for name, pid in pids.items()}
            check(f"{what} the policy of every mapping of every worker (numa_maps)",
                  {gpu.name: [word(policy, machine.memory(gpu))] for gpu in gpus},
                  {name: policies for name, (policies, _) in of_memory.items()})  # fmt: skip
            if policy != "none":
                pages = {name: sum(each.values()) for name, (_, each) in of_memory.items()}
                check(f"{what} private pages on other nodes than those planned (of {sum(pages.values())})",
                      {gpu.name: 0 for gpu in gpus},
                      {gpu.name: sum(count for node, count in of_memory[gpu.name][1].items()
                                     if node not in machine.memory(gpu)) if pages[gpu.name] else "no page"
                       for gpu in gpus})  # fmt: skip
            others = {"supervisor": found["supervisor_pid"], "guardian": found["guardian_pid"],
                      "scheduler": found["scheduler"]["pid"]}  # fmt: skip
            check(f"{what} supervisor, guardian and scheduler are not bound",
                  {name: [text(ALL_CPUS), "default"] for name in others},
                  {name: bound(pid) for name, pid in others.items()})  # fmt: skip


def other_commands():
    show = ("echo RANK $RANK $(grep Cpus_allowed_list /proc/self/status) $(head -n 1 /proc/self/numa_maps)")
    shown = re.compile(r"RANK (\d+) Cpus_allowed_list: (\S+) \S+ (prefer \(many\):\S+|\S+)")

    def ranks(said):
        return {f"gpu{rank}": [cpus, policy] for rank, cpus, policy in shown.findall(needs(said).out)}

    check("run: CPUs and memory policy of every rank", {gpu.name: as_planned(gpu) for gpu in GPUS},
          lambda: ranks(program("run", "--", "sh", "-c", show)))  # fmt: skip
    check("exec --rank 4: CPUs and memory policy", {"gpu4": as_planned(GPUS[4])},
          lambda: ranks(program("exec", "--rank", 4, "--", "sh", "-c", show, RANK="4")))  # fmt: skip
    check("run under numactl --membind=3: its memory policy stands",
          {"gpu0": [text(machine.cpus(GPUS[0])), "bind:3"]},
          lambda: ranks(program("run", "--gpus", 0, "--", "sh", "-c", show,
                                before=["numactl", "--membind=3"])))  # fmt: skip
    check("run under numactl --membind=3 with --memory-policy: it is replaced, and that is noted",
          containing("replaces", "bind 3"),
          lambda: str(program("plan", "--gpus", 0, "--memory-policy=preferred", "--explain",
                              before=["numactl", "--membind=3"])))  # fmt: skip


def sent(port):
    return int(sysfs(f"class/infiniband/{port.split(':')[0]}/ports/1/hw_counters/sent_pkts"))


def rdma_lanes():
    pairs = {("gpu0", "gpu2"): PORTS["gpu0"], ("gpu2", "gpu0"): PORTS["gpu2"]}
    with up(*PAIR, *RDMA):
        found = state()
        check("lanes: shared memory first, and rc on the planned port of each side",
              {pair: f"rc_verbs/{port}" for pair, port in pairs.items()},
              lambda: {pair: next((lane for lane in each if "/roce" in lane), "none")
                       for pair, each in lanes(found).items()})  # fmt: skip
    before = {port: sent(port) for port in PORTS.values()}
    with up(*PAIR, *RDMA, **ONLY_RDMA):
        found = state()
        check("lanes: rc alone, with UCX_TLS=rc,self", set(pairs.values()),
              lambda: {lane.split("/")[1] for each in lanes(found).values() for lane in each
                       if lane.startswith("rc_verbs/")})  # fmt: skip
        verified = program("verify", "lab", "--memory", "host", **ONLY_RDMA)
        check("verify: a downgrade from shared memory, with its cause (exit 4)",
              containing("exit 4", "downgraded", "UCX_TLS=rc,self"), str(verified))  # fmt: skip

        def packets(seen):
            """more than 500 packets on both planned ports, none on the others"""
            return all(seen[port] > 500 if port in pairs.values() else seen[port] == 0 for port in seen)

        check("lanes: the packets that the kernel counts", packets,
              lambda: {port: sent(port) - before[port] for port in before})  # fmt: skip
    with up(*PAIR, "--net-devices", "none", **ONLY_RDMA):
        check("lanes: what is left to UCX is left to it (--net-devices none, UCX_TLS=rc,self)",
              containing("rc_verbs/roce"), lambda: lanes(state()))  # fmt: skip


#: Two processes with a connection of `direct://` over TCP, as between machines: what arrives, and how.
DIRECT = """
import asyncio, json, subprocess, sys
from cuda_cluster import comm
from distributed.comm import connect, listen
from distributed.protocol import to_serialize

comm._connect_unix = lambda names: None
data = bytes(range(256)) * 8192

async def answer(end):
    for _ in range(3):
        got = await end.read()
        assert bytes(got["data"]) == data
        await end.write({"data": to_serialize(got["data"]), "received": comm.received()})

async def main():
    if sys.argv[1:]:
        end = await connect(sys.argv[1])
        for _ in range(3):
            await end.write({"data": to_serialize(data)})
            got = await end.read()
            assert bytes(got["data"]) == data
        print(json.dumps({"ours": comm.received(), "theirs": got["received"],
                          "lanes": end.extra_info["ucx"]}))
        return
    async with listen("direct://127.0.0.1:0", answer) as listener:
        command = [sys.executable, "-c", sys.orig_argv[-1], listener.contact_address]
        ended = await asyncio.create_subprocess_exec(*command)
        sys.exit(await ended.wait())

asyncio.run(main())
"""


def direct():
    what = "direct:// between machines: large frames by rc on the port that UCX may use, both ways"
    if not pathlib.Path("/lab/lib_comm.so").exists() or not pathlib.Path("/lab/dask").exists():
        table.not_run(what, "no Dask and lib_comm.so: scripts/setup.sh --tests; cargo build -p cuda-cluster-comm")
        return
    environment = {**os.environ, "PYTHONPATH": "/lab/python:/lab/dask", "CUDA_CLUSTER_COMM": "/lab/lib_comm.so",
                   "UCX_NET_DEVICES": PORTS["gpu0"], **ONLY_RDMA}  # fmt: skip
    before = sent(PORTS["gpu0"])
    found = json.loads(sh("python3", "-c", DIRECT, env=environment).splitlines()[-1])
    check(what, [3 << 21, 3 << 21, f"rc_verbs/{PORTS['gpu0']}"],
          [found["ours"]["ucx"], found["theirs"]["ucx"],
           next((lane for lane in found["lanes"] if "roce" in lane), "none")])  # fmt: skip

    def enough(seen):
        """at least the packets of 12 MiB in 4 KiB each"""
        return seen >= 3072

    check("direct:// between machines: the packets that the kernel counts", enough,
          lambda: sent(PORTS["gpu0"]) - before)  # fmt: skip


def cables():
    pulled = next(nic for nic in NICS if f"{machine.roce(nic)}:1" == PORTS["gpu2"])

    @contextlib.contextmanager
    def pull():
        sh("ip", "link", "set", cable(pulled), "down")
        try:
            yield
        finally:
            sh("ip", "link", "set", cable(pulled), "up")

    def shown():
        return " ".join(worker("gpu2").get("notes", [])) + str(worker("gpu2")["state"])

    with up(*PAIR, *RDMA):
        with pull():
            check("cable pulled: the worker goes on over shared memory and says that the port is down",
                  containing(PORTS["gpu2"], "DOWN", "ready"),
                  lambda: eventually(lambda: str(program("ps", "lab", "-o", "wide")) + shown(),
                                     lambda seen: "DOWN" in seen))  # fmt: skip
            check("cable pulled: verify fails for it (exit 4)", containing("exit 4", PORTS["gpu2"]),
                  lambda: str(program("verify", "lab", "--memory", "host")))  # fmt: skip
            check("cable pulled: a plan takes another NIC and says why", containing("roce", "DOWN"),
                  lambda: [plan(*PAIR, *RDMA)["workers"][1]["nics"],
                           [w for w in plan(*PAIR, *RDMA)["workers"][1]["why"]
                            if w["choice"] == "nic"]])  # fmt: skip
        def without_it(seen):
            """no port is DOWN"""
            return "exit 0" in seen and "DOWN" not in seen

        check("cable back: the note is gone", without_it,
              lambda: eventually(lambda: str(program("ps", "lab", "-o", "wide")),
                                 lambda seen: "DOWN" not in seen))  # fmt: skip
        needs(program("restart", "lab", "gpu2"))
        check("cable back: after a restart it has its rc lane", f"rc_verbs/{PORTS['gpu2']}",
              lambda: eventually(lambda: next((lane for lane in lanes(state()).get(("gpu2", "gpu0"), [])
                                               if "/roce" in lane), "none"),
                                 lambda seen: seen != "none"))  # fmt: skip
    with up(*PAIR, *RDMA, **ONLY_RDMA):
        with pull():
            said = re.compile(r"gpu2: was ended by .*DOWN")
            check("cable pulled, rc alone: UCX ends the worker, and its next start says why",
                  containing("gpu2: was ended by", "DOWN"),
                  lambda: eventually(lambda: " ".join(program("events", "lab").out.split()),
                                     said.search)[-900:])  # fmt: skip
            lines = len(program("logs", "lab").out.splitlines())

            def short(seen):
                """fewer than 400 lines of log"""
                return seen < 400

            check("cable pulled, rc alone: the log does not repeat itself", short, lines)
        needs(program("restart", "lab", "gpu2"))
        check("cable back, rc alone: after a restart the cluster is READY again",
              ["ready", f"rc_verbs/{PORTS['gpu2']}"],
              lambda: eventually(lambda: [state()["state"], next(iter(
                  lane for lane in lanes(state()).get(("gpu2", "gpu0"), []) if "rc" in lane), "none")],
                  lambda seen: seen[0] == "ready" and seen[1] != "none"))  # fmt: skip


def groups():
    return {path.name for path in CGROUPS.glob("**/cuda-cluster*")}


def kills():
    check("before: no process of the program, no control group, no shared memory", [0, 0, []],
          lambda: [len(processes()), len(groups()), os.listdir("/dev/shm")])  # fmt: skip
    with up(*PAIR, *RDMA):
        old = worker("gpu2")["pid"]
        os.kill(old, signal.SIGKILL)

        def again():
            new = worker("gpu2")
            return [new["state"], new["restarts"], new["pid"] != old]

        check("kill -9 of a worker: READY again, once restarted, in another process",
              ["ready", 1, True], lambda: eventually(again, lambda seen: seen == ["ready", 1, True]))  # fmt: skip
        new = worker("gpu2")["pid"]
        check("kill -9 of a worker: the new one is bound as the old one",
              as_planned(GPUS[2]), lambda: bound(new))
        check("kill -9 of a worker: its rc lane is open again", f"rc_verbs/{PORTS['gpu2']}",
              lambda: next(lane for lane in lanes(state())["gpu2", "gpu0"] if "/roce" in lane))  # fmt: skip
        check("the cluster's processes are in a control group", "cgroup", lambda: state()["containment"])
        os.kill(state()["supervisor_pid"], signal.SIGKILL)
        check("kill -9 of the supervisor: no process, no control group, no shared memory is left",
              [0, 0, []], lambda: eventually(
                  lambda: [len(processes()), len(groups()), os.listdir("/dev/shm")],
                  lambda seen: seen == [0, 0, []]))  # fmt: skip


@contextlib.contextmanager
def group(name, **settings):
    path = CGROUPS / name
    path.mkdir()
    try:
        for key, value in settings.items():
            (path / key.replace("_", ".", 1)).write_text(str(value))
        yield path
    finally:
        eventually(lambda: (path / "cgroup.events").read_text(), lambda seen: "populated 0" in seen)
        for below in sorted(path.glob("**/"), reverse=True):
            below.rmdir()


def control_groups():
    limit = 1 << 30
    with group("small", memory_max=limit) as small:
        # The limits of memory by node are larger, so the group's is what counts.
        check("memory control group: all workers together may not use more than it has",
              {gpu.name: limit // len(GPUS) for gpu in GPUS},
              lambda: {w["name"]: w["memory_limit_bytes"] for w in plan(group=small)["workers"]})  # fmt: skip
        with up(*PAIR, group=small):
            found = state()
            pids = [found["supervisor_pid"], found["guardian_pid"], found["scheduler"]["pid"],
                    *(w["pid"] for w in found["workers"])]  # fmt: skip
            check("memory control group: every process of the cluster stays in it", {"small"},
                  lambda: {pathlib.Path(f"/proc/{pid}/cgroup").read_text().split("/")[1].strip()
                           for pid in pids})  # fmt: skip
    cpus, nodes = {0, 5}, {0, 2}
    with group("few", cpuset_cpus=text(cpus), cpuset_mems=text(nodes)) as few:
        check("cpuset control group: each worker gets near CPUs, else its package's, else all allowed",
              {gpu.name: text(machine.cpus(gpu, cpus)) for gpu in GPUS},
              lambda: {w["name"]: w["cpus"] for w in plan(group=few)["workers"]})  # fmt: skip
        check("cpuset control group: the same for memory",
              {gpu.name: text(machine.memory(gpu, nodes)) or None for gpu in GPUS},
              lambda: {w["name"]: w["mems"] for w in plan(group=few)["workers"]})  # fmt: skip
        with up("--gpus", "0,2,4", group=few):
            check("cpuset control group: so the kernel has it",
                  {gpu.name: as_planned(gpu, cpus, nodes) for gpu in (GPUS[0], GPUS[2], GPUS[4])},
                  lambda: {w["name"]: bound(w["pid"]) for w in state()["workers"]})  # fmt: skip


def user(locked):
    """How a user without rights runs the program, with so much locked memory."""
    home = pathlib.Path("/tmp/user")
    home.mkdir(exist_ok=True)
    os.chown(home, 1000, 1000)
    plain = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--bounding-set=-all"]
    return {"before": ["sh", "-c", f'ulimit -l {locked}; exec "$@"', "sh", *plain],
            "XDG_RUNTIME_DIR": str(home)}  # fmt: skip


def refusals():
    devices = list(pathlib.Path("/dev/infiniband").glob("uverbs*"))
    for device in devices:
        device.chmod(0o600)
    plain = user("unlimited")
    with up(*PAIR, *RDMA, **plain):
        check("unreadable uverbs: up goes on without, ps says why",
              containing("/dev/infiniband", PORTS["gpu0"]),
              lambda: str(program("ps", "lab", "-o", "wide", **plain)))  # fmt: skip
        check("unreadable uverbs: verify fails (exit 4)", containing("exit 4", PORTS["gpu0"]),
              lambda: str(program("verify", "lab", "--memory", "host", **plain)))  # fmt: skip
    check("unreadable uverbs: with nothing else to reach peers, up fails and names it",
          containing("exit 1", "/dev/infiniband"),
          lambda: str(program("up", *PAIR, *RDMA, "--name", "lab", "--detach", **plain, **ONLY_RDMA)))  # fmt: skip
    check("unreadable uverbs: doctor names it", containing("/dev/infiniband"),
          lambda: str(program("doctor", *RDMA, **plain)))  # fmt: skip
    for device in devices:
        device.chmod(0o666)
    check("64 KiB of locked memory: refused before anything starts, with the limit and what to do",
          containing("exit 1", "locked memory is 64.0 KiB", "hint:"),
          lambda: str(program("up", *PAIR, *RDMA, "--name", "lab", "--detach", **user(64))))  # fmt: skip
    with up(*PAIR, *RDMA, **plain):
        check("a user who may use the devices has rc lanes", f"rc_verbs/{PORTS['gpu0']}",
              lambda: next((lane for lane in lanes(state(**plain))["gpu0", "gpu2"] if "/roce" in lane),
                           "none"))  # fmt: skip


def libraries():
    what = "a libucp without verbs (PyPI's) is not taken silently for a plan with InfiniBand"
    wheel = pathlib.Path("/lab/venv")
    if wheel.exists():
        active = {"VIRTUAL_ENV": str(wheel)}
        check(what, containing("libuct_ib", "which are asked for"),
              lambda: str(program("plan", *PAIR, *RDMA, **active)))  # fmt: skip
        with up(*PAIR, *RDMA, **active):
            check("a libucp without verbs: ps says that the port is not in use, and why",
                  containing(f"{PORTS['gpu0']} is not in use", "libuct_ib is not there"),
                  lambda: str(program("ps", "lab", "-o", "wide")))  # fmt: skip
    else:
        table.not_run(what, "there is no libucx in .venv: scripts/setup.sh --tests installs one")
    with up(*PAIR):
        # Debian's libucp does not know CUDA.
        check("a libucp without CUDA: device memory arrives, through host memory",
              {("gpu0", "gpu2"): "measured", ("gpu2", "gpu0"): "measured"},
              lambda: {(p["from"], p["to"]): "measured" if p["gb_per_s"] else p["verdict"]
                       for p in program("verify", "lab", "--memory", "device", "-o", "json").json()["pairs"]})  # fmt: skip
        check("a libucp without CUDA: no worker dies of it", {"gpu0": 0, "gpu2": 0},
              lambda: {w["name"]: w["restarts"] for w in state()["workers"]})  # fmt: skip


PARTS = [places, topology, nics, preflight, bindings, other_commands, rdma_lanes, direct, cables, kills, control_groups,
         refusals, libraries]  # fmt: skip

if __name__ == "__main__":
    prepare()
    table.run(PARTS)
