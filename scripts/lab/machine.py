"""The lab's machine: its NUMA nodes and PCI devices, and all that follows from them.

QEMU's arguments, the GPUs that the stand-in for NVML describes, and what the checks expect come
from `NODES` and `BRIDGES` alone.

    machine.py qemu          QEMU's arguments, one a line
    machine.py gpus          the description for the stand-in of NVML
"""

import itertools
import json
import sys

#: NUMA node: package, CPUs, MiB of memory. Node 4 has no memory, node 5 no CPUs.
NODES = {
    0: (0, [0, 1], 1024),
    1: (0, [2, 3, 4], 1024),
    2: (1, [5, 6], 1024),
    3: (1, [7, 8], 1024),
    4: (1, [9], 0),
    5: (None, [], 1024),
}
CPUS_PER_PACKAGE = 5
#: Distance between two nodes: within a package, and across.
NEAR, FAR = 15, 30

#: Host bridges: NUMA node, number of the first bus, and what is on each root port: a device, or a
#: switch as the list of what is below it.
BRIDGES = [
    (0, 0x10, [["gpu0", "nic0"]]),
    (0, 0x18, ["gpu1"]),
    (1, 0x20, [["gpu2", "nic1"], "gpu3"]),
    (2, 0x30, [["gpu4", ["gpu5", "nic2"]]]),
    (3, 0x40, ["nic3"]),
    (4, 0x50, ["gpu6"]),
    (5, 0x60, ["gpu7"]),
]
#: What QEMU puts where the machine has a GPU: any small device.
GPU = "bochs-display"
NIC = "virtio-net-pci"


class Device:
    """A device, or a bridge above devices."""

    def __init__(self, name, kind, node, place, above, arguments):
        self.name, self.kind, self.node = name, kind, node
        self.place = place  # "0000:11:00.0"; a host bridge is "pci0000:10"
        self.above = above  # nearest first
        self.arguments = arguments


def devices():
    """Everything on the PCI buses, bridges before what is below them."""
    chassis = itertools.count(1)
    found = []

    def add(name, kind, node, place, above, arguments):
        device = Device(name, kind, node, place, above, arguments)
        found.append(device)
        return device

    def below(what, node, bus, numbers, above):
        # Firmware numbers buses depth first, so the next free number is that of the bus below.
        number = next(numbers)
        place = f"0000:{number:02x}:00.0"
        if isinstance(what, str):
            if what.startswith("gpu"):
                arguments = f"{GPU},id={what},bus={bus},romfile="
            else:
                mac = f"52:54:00:12:34:{int(what[3:]):02x}"
                arguments = f"{NIC},id={what},bus={bus},netdev=cable-{what},mac={mac},romfile="
            add(what, what[:3], node, place, above, arguments)
            return
        switch = f"switch{number:02x}"
        up = add(switch, "switch_up", node, place, above, f"x3130-upstream,id={switch},bus={bus}")
        inside = next(numbers)
        for slot, each in enumerate(what):
            port = f"{switch}-{slot}"
            at = f"0000:{inside:02x}:{slot:02x}.0"
            down = add(port, "switch_down", node, at, [up, *above],
                       f"xio3130-downstream,id={port},bus={switch},addr={slot}.0,"
                       f"chassis={next(chassis)},slot={slot}")  # fmt: skip
            below(each, node, port, numbers, [down, up, *above])

    for node, bus, ports in BRIDGES:
        host = add(f"host{bus:02x}", "host", node, f"pci0000:{bus:02x}", [],
                   f"pxb-pcie,id=host{bus:02x},bus=pcie.0,bus_nr={bus},numa_node={node}")  # fmt: skip
        numbers = itertools.count(bus + 1)
        for slot, each in enumerate(ports):
            name = f"root{bus:02x}-{slot}"
            port = add(name, "root_port", node, f"0000:{bus:02x}:{slot:02x}.0", [host],
                       f"pcie-root-port,id={name},bus={host.name},addr={slot}.0,"
                       f"chassis={next(chassis)},slot={slot}")  # fmt: skip
            below(each, node, name, numbers, [port, host])
    return found


DEVICES = devices()
GPUS = sorted((d for d in DEVICES if d.kind == "gpu"), key=lambda d: d.name)
NICS = sorted((d for d in DEVICES if d.kind == "nic"), key=lambda d: d.name)


def uuid(gpu):
    return f"GPU-00000000-0000-4000-8000-{int(gpu.name[3:]):012}"


def roce(nic):
    """The RDMA device that Soft-RoCE makes of a NIC."""
    return "roce" + nic.name[3:]


def link(a, b):
    """How two devices reach each other, in the words of `nvidia-smi topo -m`."""
    if a.node != b.node:
        return "SYS"
    shared = [bridge for bridge in a.above if bridge in b.above]
    if not shared:
        return "NODE"
    if shared[0].kind == "host":
        return "PHB"
    switches = {d.name for side in (a, b) for d in side.above[: side.above.index(shared[0]) + 1]
                if d.kind == "switch_up"}  # fmt: skip
    return "PIX" if len(switches) <= 1 else "PXB"


def text(numbers):
    """`0-1,4`, as the kernel writes sets."""
    runs = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def members(text):
    """The numbers of `0-1,4`."""
    ends = [list(map(int, part.split("-"))) for part in text.split(",") if part]
    return {number for run in ends for number in range(run[0], run[-1] + 1)}


ALL_CPUS = {cpu for _, cpus, _ in NODES.values() for cpu in cpus}


ALL_NODES = {node for node, (_, _, mib) in NODES.items() if mib}


def of_package(gpu):
    """The CPUs and the memory nodes of a GPU's package."""
    package = NODES[gpu.node][0]
    near = {node: each for node, each in NODES.items() if each[0] == package is not None}
    return {cpu for each in near.values() for cpu in each[1]}, {n for n in near if near[n][2]}


def cpus(gpu, allowed=frozenset(ALL_CPUS)):
    """The CPUs for a GPU's worker: those of its node, else of its package, else any."""
    return set(NODES[gpu.node][1]) & allowed or of_package(gpu)[0] & allowed or set(allowed)


def memory(gpu, allowed=frozenset(ALL_NODES)):
    """The nodes whose memory its worker uses: its own, else those of its package, else it is free."""
    return {gpu.node} & ALL_NODES & allowed or of_package(gpu)[1] & allowed


def distance(gpu, nic):
    """How far a NIC is from a GPU: the less the nearer."""
    return ["PIX", "PXB", "PHB", "NODE", "SYS"].index(link(gpu, nic))


def nics():
    """The NIC of each GPU's worker: the nearest; of equally near ones the one that serves fewest."""
    chosen = {}
    # Those with a choice come last.
    for gpu in sorted(GPUS, key=lambda gpu: sum(link(gpu, nic) == "SYS" for nic in NICS)):
        serves = lambda nic: list(chosen.values()).count(nic)
        chosen[gpu] = min(NICS, key=lambda nic: (distance(gpu, nic), serves(nic)))
    return chosen


def qemu():
    """QEMU's arguments for all of it."""
    total = len(ALL_CPUS)
    yield from ["-smp", f"{total},sockets={total // CPUS_PER_PACKAGE},cores={CPUS_PER_PACKAGE}"]
    yield from ["-m", f"{sum(mib for _, _, mib in NODES.values())}M"]
    for node, (_, _, mib) in NODES.items():
        if mib:
            yield from ["-object", f"memory-backend-ram,id=memory{node},size={mib}M"]
        backend = f",memdev=memory{node}" if mib else ""
        yield from ["-numa", f"node,nodeid={node}{backend}"]
    for node, (package, cpus, _) in NODES.items():
        for cpu in cpus:
            core = cpu - package * CPUS_PER_PACKAGE
            yield from ["-numa", f"cpu,node-id={node},socket-id={package},core-id={core},thread-id=0"]
    for a, b in itertools.combinations(NODES, 2):
        distance = NEAR if NODES[a][0] == NODES[b][0] else FAR
        yield from ["-numa", f"dist,src={a},dst={b},val={distance}"]
    for nic in NICS:
        # All on one hub.
        yield from ["-netdev", f"hubport,id=cable-{nic.name},hubid=0"]
    for device in DEVICES:
        yield from ["-device", device.arguments]


def gpus():
    """What the stand-in for NVML tells: where the GPUs are, not what is near them."""
    return {"gpus": [
        {"index": index, "uuid": uuid(gpu), "name": "NVIDIA A100-PCIE-40GB", "pci": gpu.place,
         "memory_bytes": 256 << 20, "compute_capability": "8.0"}
        for index, gpu in enumerate(GPUS)
    ]}  # fmt: skip


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["qemu"]:
            print(*qemu(), sep="\n")
        case ["gpus"]:
            json.dump(gpus(), sys.stdout)
        case _:
            sys.exit(__doc__)
