"""A Slurm of two nodes on this one machine, for tests: real daemons, with a folder, a key and ports
of their own. The GPUs of its nodes are made up.

*Invariant:* nothing of a Slurm that is installed is used but its programs, and nothing is left.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("node0", "node1")
#: Daemons are not on everybody's path.
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def missing():
    """Programs that are not installed."""
    return [one for one in (*DAEMONS, "sbatch", "srun") if shutil.which(one, path=PATH) is None]


class Slurm:
    """Runs between `with` and its end."""

    def __init__(self, gpus):
        self._gpus = gpus
        self._daemons = []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            # Short, because socket paths are.
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ccs")))
            self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
            stack.callback(self._end)
            self._configure()
            key = self.folder / "munge.key"
            key.write_bytes(os.urandom(128))
            key.chmod(0o400)
            own = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid",
                   "log-file": "munge.log", "seed-file": "munge.seed"}  # fmt: skip
            files = [f"--{name}={self.folder / file}" for name, file in own.items()]
            self._start("munged", "--foreground", "--force", *files)
            self._wait(lambda: (self.folder / "munge.socket").exists())
            self._start("slurmctld", "-D")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            idle = f"{len(NODES)} idle"
            self._wait(lambda: idle in self.run("sinfo", "-h", "-o", "%D %t", check=False))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def run(self, *command, check=True, **kwargs):
        """Runs a command of Slurm's; returns what it printed."""
        kwargs = {"env": self.environment, **kwargs}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout

    def jobs(self):
        """States of the jobs that have not ended, by their ids."""
        return dict(line.split() for line in self.run("squeue", "-h", "-o", "%i %T").splitlines())

    def processes(self):
        """Processes of jobs, with their commands."""
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                own = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                of_job = any(one.startswith(b"SLURM_JOB_ID=") for one in own)
                if of_job and f"SLURM_CONF={self.environment['SLURM_CONF']}".encode() in own:
                    command = Path(f"/proc/{entry}/cmdline").read_bytes()
                    found[int(entry)] = command.replace(b"\0", b" ").decode()
        return found

    def logs(self):
        """What the daemons have said."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    def _configure(self):
        host, folder = socket.gethostname().partition(".")[0], self.folder
        first, *ports = _free_ports(1 + len(NODES))
        user = getpass.getuser()
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={first}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge.socket",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/%n.pid",
            # More CPUs than this machine has; so nothing is bound, and no control groups are used.
            "SlurmdParameters=config_overrides",
            "TaskPlugin=task/none",
            "ProctrackType=proctrack/linuxproc",
            "JobAcctGatherType=jobacct_gather/none",
            # What `sacct --completion` reads where no slurmdbd keeps accounts.
            "JobCompType=jobcomp/filetxt",
            f"JobCompLoc={folder}/completed",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "GresTypes=gpu",
            "MpiDefault=none",
            "ReturnToService=2",
            # Of a job that ends, whose processes end by SIGTERM.
            "KillWait=60",
            f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
        ]
        for node, port in zip(NODES, ports):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 "
                f"RealMemory=64000 Gres=gpu:{self._gpus}"
            )
            (folder / node).mkdir()
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        for number in range(self._gpus):
            # A device file that is there; Slurm takes the number from its name.
            (folder / f"gpu{number}").symlink_to("/dev/null")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{self._gpus - 1}]\n")

    def _start(self, program, *arguments):
        log = self.folder / f"{len(self._daemons)}-{program}.out"
        with open(log, "wb") as output:
            command = [shutil.which(program, path=PATH), *arguments]
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                      stderr=subprocess.STDOUT, env=self.environment)  # fmt: skip
        self._daemons.append(daemon)

    def _wait(self, holds, within=60):
        deadline = time.monotonic() + within
        while not holds():
            ended = any(daemon.poll() is not None for daemon in self._daemons)
            assert not ended and time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def _end(self):
        if len(self._daemons) > 1:
            self.run("scancel", "--user", getpass.getuser(), check=False)
            with contextlib.suppress(AssertionError):
                self._wait(lambda: not self.jobs())
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in bound]
