"""Checks under what starts programs on servers: systemd with `configs/cuda-cluster@.service`, Slurm
with control groups that limit CPUs, and Open MPI."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import time

import machine
from guest import (ENVIRONMENT, LIMIT, Table, Wrong, containing, eventually, prepare, processes,
                   program, sh, state)  # fmt: skip
from machine import ALL_CPUS, GPUS, members, text

UNIT = "cuda-cluster@lab.service"
#: Where the unit keeps its run directory.
THERE = {"XDG_RUNTIME_DIR": "/run/cuda-cluster-lab"}
SPEC = pathlib.Path("/etc/cuda-cluster/lab.yaml")
GOOD = "version: 1\nname: lab\ngpus: 0,2\nsupervision:\n  ready_within: 170s\n"

table = Table()
check = table.check


def install():
    shutil.copy("/lab/cuda-cluster", "/usr/local/bin/")
    # What the made-up GPUs need; nothing else differs from what is installed on a server.
    lines = [f"{name}={ENVIRONMENT[name]}" for name in ENVIRONMENT
             if name.startswith("CUDA_CLUSTER_") or name == "LD_LIBRARY_PATH"]  # fmt: skip
    units = pathlib.Path("/etc/systemd/system")
    shutil.copy("/lab/configs/cuda-cluster@.service", units)
    own = units / "cuda-cluster@.service.d"
    own.mkdir(exist_ok=True)
    (own / "lab.conf").write_text("[Service]\nTimeoutStartSec=180\n" + "".join(
        f'Environment="{line}"\n' for line in lines))  # fmt: skip
    SPEC.parent.mkdir(exist_ok=True)
    SPEC.write_text(GOOD)
    sh("systemctl", "daemon-reload")


def shown(*names):
    said = sh("systemctl", "show", UNIT, *(f"--property={name}" for name in names))
    found = dict(line.split("=", 1) for line in said.splitlines())
    # systemd has an order of its own.
    return {name: found[name] for name in names}


def journal():
    return sh("journalctl", "--unit", UNIT, "--output=cat", "--lines=200")


def main_pid():
    return int(shown("MainPID")["MainPID"])


def all_pids():
    found = state(**THERE)
    return {found["supervisor_pid"], found["guardian_pid"], found["scheduler"]["pid"],
            *(worker["pid"] for worker in found["workers"])}  # fmt: skip


def again(old, restarts):
    """The unit's state when systemd has started it again, and how many old processes are left."""

    def look():
        now = shown("ActiveState", "NRestarts", "MainPID")
        fresh = int(now["MainPID"]) not in {0, *old}
        return [now["ActiveState"], int(now["NRestarts"]), fresh, len(old & processes())]

    return eventually(look, lambda seen: seen == ["active", restarts, True, 0])


def systemd():
    install()
    try:
        sh("systemctl", "start", UNIT)
    except Wrong as error:
        raise Wrong(f"{error} {journal()[-900:]}") from None
    check("systemd: start returns when every process is READY", ["active", "running", "ready"],
          lambda: [*shown("ActiveState", "SubState").values(), state(**THERE)["state"]])  # fmt: skip
    check("systemd: its status line", containing("READY"), lambda: shown("StatusText")["StatusText"])
    check("systemd: every process is in the unit's control group", [UNIT],
          lambda: sorted({next(part for part in pathlib.Path(f"/proc/{pid}/cgroup").read_text().split("/")
                               if part.strip() == UNIT).strip() for pid in all_pids()}))  # fmt: skip
    check("systemd: processes are held by a control group of the cluster's own", "cgroup",
          lambda: state(**THERE)["containment"])  # fmt: skip
    check("systemd: workers are bound as without it",
          {gpu.name: text(machine.cpus(gpu)) for gpu in (GPUS[0], GPUS[2])},
          lambda: {w["name"]: allowed(w["pid"]) for w in state(**THERE)["workers"]})  # fmt: skip
    check("systemd: locked memory is not limited", ["unlimited"],
          lambda: sorted({re.search(r"Max locked memory\s+(\S+)",
                                    pathlib.Path(f"/proc/{pid}/limits").read_text())[1]
                          for pid in all_pids()}))  # fmt: skip
    old = all_pids()
    time.sleep(45)
    check("systemd: after 45 s, more than the watchdog's 30, nothing was restarted", ["0", True],
          lambda: [shown("NRestarts")["NRestarts"], old == all_pids()])  # fmt: skip
    os.kill(main_pid(), signal.SIGSTOP)
    check("systemd: a supervisor that stops answering is restarted by the watchdog, with nothing left",
          ["active", 1, True, 0], lambda: again(old, 1))  # fmt: skip
    check("systemd: and it was the watchdog", containing("watchdog"),
          lambda: next(iter(re.findall(r".*watchdog.*", journal().lower())), "no word of it"))  # fmt: skip
    old = eventually_ready()
    os.kill(main_pid(), signal.SIGKILL)
    check("systemd: a supervisor that crashes is restarted, with nothing left", ["active", 2, True, 0],
          lambda: again(old, 2))  # fmt: skip
    eventually_ready()
    sh("systemctl", "stop", UNIT)
    check("systemd: stop ends it in order: no process, no run directory",
          ["inactive", "success", 0, False],
          lambda: [*shown("ActiveState", "Result").values(), len(processes()),
                   os.path.exists("/run/cuda-cluster-lab")])  # fmt: skip
    SPEC.write_text(GOOD + "nonsense: 1\n")

    def wrong():
        try:
            return sh("systemctl", "start", UNIT)
        except Wrong:
            return [*shown("ActiveState", "ExecMainStatus", "NRestarts").values()]

    check("systemd: a spec with an error fails the start (2), and is not tried again",
          ["failed", "2", "0"], wrong)  # fmt: skip
    sh("systemctl", "stop", UNIT)


def eventually_ready():
    eventually(lambda: program("ps", "lab", "-o", "json", **THERE),
               lambda said: said.code == 0 and said.json()["state"] == "ready")  # fmt: skip
    return all_pids()


def allowed(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return re.search(r"Cpus_allowed_list:\s*(\S+)", status)[1]


#: Nodes of Slurm, all of them this machine: one that has all of its CPUs, and two that have every
#: second one. All have the same GPUs. No job runs on the one and the two at once.
ONE, BOTH = "lab", ["left", "right"]
PARTS_OF_CPUS = [{cpu for cpu in ALL_CPUS if cpu % 2 == odd} for odd in range(2)]
HERE = "NodeHostname=lab NodeAddr=10.0.0.1"


def comma(cpus):
    return ",".join(map(str, sorted(cpus)))


SLURM = f"""\
ClusterName=lab
SlurmctldHost=lab(10.0.0.1)
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmdPidFile=/run/slurmd-%n.pid
SlurmdLogFile=/var/log/slurm/%n.log
TaskPlugin=task/cgroup,task/affinity
ProctrackType=proctrack/cgroup
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=120
SlurmdTimeout=0
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs={len(ALL_CPUS)} Sockets=2 CoresPerSocket={machine.CPUS_PER_PACKAGE} \
ThreadsPerCore=1 RealMemory=3000 Gres=gpu:{len(GPUS)}
NodeName={ONE} {HERE} Port=6820
NodeName={BOTH[0]} {HERE} Port=6821 CpuSpecList={comma(PARTS_OF_CPUS[1])}
NodeName={BOTH[1]} {HERE} Port=6822 CpuSpecList={comma(PARTS_OF_CPUS[0])}
PartitionName=one Nodes={ONE} Default=YES MaxTime=INFINITE State=UP
PartitionName=two Nodes={",".join(BOTH)} MaxTime=INFINITE State=UP
"""
SHOW = ("echo RANK $RANK of $WORLD_SIZE local $LOCAL_RANK of $LOCAL_WORLD_SIZE gpus $CUDA_VISIBLE_DEVICES "
        "cpus $(grep Cpus_allowed_list /proc/self/status | cut -f 2) within $WITHIN")  # fmt: skip
SHOWN = re.compile(r"RANK (\d+) of (\d+) local (\d+) of (\d+) gpus (\S+) cpus (\S+) within ?(\S*)")
#: Runs a command with the CPUs that are allowed before it does anything in WITHIN.
WITHIN = ["sh", "-c", 'export WITHIN=$(grep Cpus_allowed_list /proc/self/status | cut -f 2); exec "$@"',
          "sh"]  # fmt: skip


def ranks(said):
    """What each rank shows, and the CPUs that it was allowed before."""
    found = SHOWN.findall(said)
    return ({f"rank {rank}": rest for rank, *rest, _ in found},
            {int(rank): members(within) for rank, *_, within in found})  # fmt: skip


def start_slurm():
    for name, content in (
        ("slurm.conf", SLURM),
        ("cgroup.conf", "ConstrainCores=yes\nConstrainRAMSpace=yes\n"),
        ("gres.conf", f"Name=gpu File=/tmp/gpu[0-{len(GPUS) - 1}]\n"),
    ):
        pathlib.Path("/etc/slurm", name).write_text(content)
    for number in range(len(GPUS)):
        # A device file that is there.
        pathlib.Path(f"/tmp/gpu{number}").symlink_to("/dev/null")
    pathlib.Path("/etc/munge/munge.key").write_bytes(os.urandom(128))
    shutil.chown("/etc/munge/munge.key", "munge", "munge")
    os.chmod("/etc/munge/munge.key", 0o400)
    os.makedirs("/var/spool/slurmctld", exist_ok=True)
    sh("systemctl", "restart", "munge", "slurmctld")
    for node in (ONE, *BOTH):
        os.makedirs(f"/var/spool/slurmd-{node}", exist_ok=True)
        # As Debian's unit does it for one node.
        sh("systemd-run", f"--unit=slurmd-{node}", "--property=Delegate=yes", "--property=KillMode=process",
           "--property=LimitMEMLOCK=infinity", "slurmd", "-D", "-N", node)  # fmt: skip
    idle = {node: "idle" for node in (ONE, *BOTH)}

    def states():
        return dict(line.split() for line in sh("sinfo", "-h", "-N", "-o", "%N %t").splitlines())

    found = eventually(states, idle.__eq__, 120)
    if found != idle:
        logs = pathlib.Path("/var/log/slurm").glob("*.log")
        raise Wrong(f"the nodes are {found}: {' '.join(log.read_text()[-500:] for log in logs)}")


def processes_of(job):
    """The processes of a job, wherever they are."""
    word = f"SLURM_JOB_ID={job}".encode()
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def directories_of(job):
    return [path.name for path in pathlib.Path("/run/lab/cuda-cluster").glob(f"job-{job}*")]


#: What Slurm does a minute before the time limit, for `--signal=TERM@60`.
TIME_LIMIT = "--signal=TERM"


def ended(job, *how):
    """How often a job that is ended has said so, what is left of it, and its last words."""
    if not processes_of(job) or not directories_of(job):
        raise Wrong(f"job {job} does not run")
    sh("scancel", *how, job)
    eventually(lambda: sh("squeue", "-h"), lambda seen: not seen.strip())
    said = " ".join(pathlib.Path("/tmp/job.log").read_text().split())
    return [said.count("cluster: stopped"), processes_of(job) + directories_of(job), said[-300:]]


def in_order(times):
    def judge(seen):
        return seen[:2] == [times, []]

    judge.__doc__ = f"{times} times 'cluster: stopped', nothing left"
    return judge


def slurm():
    start_slurm()
    with_plan = sh("srun", "--ntasks=1", "--cpus-per-task=3", "--cpu-bind=none", "--gpus=8", *WITHIN,
                   "sh", "-c", "echo $WITHIN; cuda-cluster plan -o json", env=ENVIRONMENT)  # fmt: skip
    cpus, planned = with_plan.split("\n", 1)
    inside = members(cpus)

    def few(seen):
        """3 of the CPUs"""
        return len(members(seen)) == 3

    check("slurm: lab: a job of three cores has a cpuset of three", few, cpus)
    check("slurm: srun … cuda-cluster plan: near CPUs within the job's, else its package's, else all of them",
          {gpu.name: text(machine.cpus(gpu, inside)) for gpu in GPUS},
          lambda: {w["name"]: w["cpus"] for w in json.loads(planned)["workers"]})  # fmt: skip
    shown, within = ranks(sh("srun", "--ntasks=4", "--gpus=4", "--exclusive", "--cpu-bind=none", *WITHIN,
                             "cuda-cluster", "exec", "--", "sh", "-c", SHOW, env=ENVIRONMENT))  # fmt: skip
    check("slurm: lab: the tasks of a step of four cores have a cpuset of four", [4] * 4,
          [len(cpus) for cpus in within.values()])  # fmt: skip
    check("slurm: srun --ntasks=4 cuda-cluster exec: rank, GPUs of the job, CPUs of each within the step's",
          {f"rank {n}": ["4", str(n), "4", "0,1,2,3", text(machine.cpus(GPUS[n], within.get(n, set())))]
           for n in range(4)}, shown)  # fmt: skip
    one_node()
    several_nodes()


def submit(*arguments, **more):
    return sh("sbatch", "--parsable", "--output=/tmp/job.log", "--open-mode=truncate", *arguments,
              "--ready-within", f"{LIMIT}s", env={**ENVIRONMENT, **more}).strip()  # fmt: skip


def one_node():
    job = submit("--gpus-per-node=2", "/lab/configs/cuda-cluster.slurm")

    def found():
        said = program("ps", f"job-{job}", "-o", "json")
        return said.json() if said.code == 0 else {"state": str(said), "workers": []}

    ready = eventually(found, lambda seen: seen["state"] == "ready")
    check("slurm: sbatch configs/cuda-cluster.slurm: READY on the job's GPUs", ["ready", [0, 1]],
          lambda: [ready["state"], [w["gpu"]["index"] for w in ready["workers"]]])  # fmt: skip
    check("slurm: its processes are in the job's control group", containing(f"job_{job}"),
          lambda: {pathlib.Path(f"/proc/{w['pid']}/cgroup").read_text().strip()
                   for w in ready["workers"]})  # fmt: skip
    check("slurm: SIGTERM, as at the time limit, ends it in order, with nothing left", in_order(1),
          lambda: ended(job, TIME_LIMIT))  # fmt: skip
    job = submit("--gpus-per-node=2", "/lab/configs/cuda-cluster.slurm")
    eventually(found, lambda seen: seen["state"] == "ready")
    check("slurm: scancel, to every process of the job, ends it in order, with nothing left", in_order(1),
          lambda: ended(job))  # fmt: skip


#: A client of the job: what each worker has.
CLIENT = """
import json, os, re, sys
from distributed import Client
def look():
    status = open("/proc/self/status").read()
    return [os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"],
            re.search(r"Cpus_allowed_list:\\s*(\\S+)", status)[1]]
with Client(scheduler_file=sys.argv[1], timeout=300) as client:
    client.wait_for_workers(4, timeout=300)
    print(json.dumps(sorted(client.run(look).values())))
"""


def several_nodes():
    what = "slurm: sbatch configs/dask-multi-node.slurm on two nodes: one cluster, GPUs and CPUs of each"
    if not pathlib.Path("/lab/dask").exists():
        table.not_run(what, "there is no Dask in .venv: scripts/setup.sh --tests installs one")
        return
    file = pathlib.Path("/tmp/scheduler.json")
    # Interpreters start slowly here.
    patient = {"PYTHONPATH": "/lab/python:/lab/dask", "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "300s",
               "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "300s", "SCHEDULER_FILE": str(file),
               "INTERFACE": "node"}  # fmt: skip
    job = submit("--partition=two", "--gpus-per-node=2", "/lab/configs/dask-multi-node.slurm",
                 "--python", "/usr/bin/python3", **patient)  # fmt: skip
    log = pathlib.Path("/tmp/job.log")

    def of_job():
        there = eventually(lambda: file.exists() or not sh("squeue", "-h").strip(), bool)
        if not there or not file.exists():
            raise Wrong(f"no scheduler: {log.read_text()[-900:] if log.exists() else 'no log'}")
        try:
            return json.loads(sh("python3", "-c", CLIENT, file, env={**ENVIRONMENT, **patient}))
        except Wrong as error:
            raise Wrong(f"{error} {log.read_text()[-900:]}") from None

    near = [[node, text(machine.cpus(GPUS[0], allowed))] for node, allowed in zip(BOTH, PARTS_OF_CPUS)]
    expected = [[node, visible, cpus] for node, cpus in near for visible in ("0,1", "1,0")]
    check(what, expected, of_job)
    check("slurm: SIGTERM, as at the time limit, ends all of it in order, with nothing left", in_order(2),
          lambda: ended(job, TIME_LIMIT))  # fmt: skip
    check("slurm: and the scheduler's file goes with it", False, file.exists)


def open_mpi():
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 4]
    env = {**ENVIRONMENT, "OMPI_MCA_btl": "self,tcp"}
    check("mpirun --bind-to none cuda-cluster exec: rank, GPUs, CPUs of each",
          {f"rank {n}": ["4", str(n), "4", ",".join(map(str, range(len(GPUS)))), text(machine.cpus(GPUS[n]))]
           for n in range(4)},
          lambda: ranks(sh(*mpirun, "--bind-to", "none", "cuda-cluster", "exec", "--",
                           "sh", "-c", 'LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK; ' + SHOW, env=env))[0])  # fmt: skip
    check("mpirun, which binds by itself: exec keeps within what it allows", 4,
          lambda: len({cpus for *_, cpus in ranks(sh(
              *mpirun, "--bind-to", "core", "--map-by", "core", "cuda-cluster", "exec", "--",
              "sh", "-c", 'LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK; ' + SHOW, env=env))[0].values()}))  # fmt: skip


PARTS = [systemd, slurm, open_mpi]

if __name__ == "__main__":
    prepare()
    socket.sethostname("lab")
    with open("/etc/hosts", "a") as hosts:
        hosts.write("10.0.0.1 lab\n")
    # Names are resolved only where an interface besides lo has an address.
    sh("ip", "link", "add", "node", "type", "dummy")
    sh("ip", "address", "add", "10.0.0.1/24", "dev", "node")
    sh("ip", "link", "set", "node", "up")
    table.run(PARTS)
