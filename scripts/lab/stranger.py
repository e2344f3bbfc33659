"""A stranger's first ten minutes: what the README tells a user who is not root to type, from a release, on a
Debian or Ubuntu with little in it. The package index is a folder. `scripts/stranger.sh` runs it in a
directory, `scripts/arm-check.sh` on an emulated Arm processor, where `up` may take long; what is under `/lab`
comes from there.

    stranger.py [PAGES]    prints what was typed and what came, and a table of what held
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import guest
from guest import Table

table = Table()
check = table.check

HOME = pathlib.Path("/home/ann")
README = pathlib.Path("/lab/README.md").read_text()
#: As after a login.
SESSION = {
    "HOME": str(HOME), "USER": "ann", "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin", "COLUMNS": "150",
    "XDG_RUNTIME_DIR": "/run/user/1000", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/lab/wheels",
}  # fmt: skip
#: What emulation needs instead of the minute that `up` gives.
PATIENCE = "25m" if "lab.suite" in pathlib.Path("/proc/cmdline").read_text() else None
LIMIT = 1700


def typed(command, *parts, user="ann", code=0):
    """Shows a command with all that it says, and whether it ended with `code` and said `parts`."""
    print(f"\n{user}$ {command}", flush=True)
    who = ["setpriv", "--reuid", "ann", "--regid", "ann", "--init-groups"] if user == "ann" else []
    active = "if [ -d demo ]; then . demo/bin/activate; fi\n" if user == "ann" else ""
    done = subprocess.run([*who, "bash", "-c", f"{active}{command}"], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
                          cwd=HOME, env={**SESSION, **({"HOME": "/root"} if user == "root" else {})})  # fmt: skip
    print(done.stdout, flush=True)
    seen = [f"exit {done.returncode}", *(f"without {part!r}" for part in parts if part not in done.stdout)]
    return check(f"{user}: {command.splitlines()[0]}", f"exit {code}", ", ".join(seen))


def here(command):
    """A command that brings up a cluster, where there is no GPU."""
    if re.match(r"cuda-cluster up\b", command):
        simulated = "" if "--simulate" in command else " --topology dgx-h100 --simulate"
        patience = f" --ready-within {PATIENCE}" if PATIENCE else ""
        return f"{command}{simulated}{patience}"
    return command.replace("simulate=True)", f'simulate=True, ready_within="{PATIENCE}")') if PATIENCE else command


def blocks():
    """The README's commands of installing, those for the program, and its lines of Python."""
    install = re.search(r'(?:^    .*\n)*^    pip install "\$\(ls.*\n(?:^    .*\n)*', README, re.M).group()
    program = re.search(r"(?:^    \$ cuda-cluster .*\n(?:^    [^$].*\n|^\n(?=    ))*)+", README, re.M).group()
    lines = re.search(r"^## Install.*?^```python\n(.*?)^```", README, re.M | re.S).group(1)
    typed_there = [each.split("  #")[0].strip() for each in re.findall(r"^    \$ (.*)", program, re.M)]
    return [each.strip() for each in install.splitlines()], typed_there, lines


def machine_itself():
    typed("id; uname -m; getconf PAGESIZE; head -n 1 /etc/os-release; python3 --version", "(ann)", "Python 3.",
          *sys.argv[1:2])  # fmt: skip


def package():
    [deb] = pathlib.Path("/lab").glob("*.deb")
    typed(f"apt-get install --yes {deb}", "Setting up cuda-cluster", user="root")
    typed("cuda-cluster --version", "cuda-cluster ")
    typed("cuda-cluster topo")
    typed("cuda-cluster plan --topology gb300-nvl72-tray")
    typed("cuda-cluster run --topology rtx-4090-2 --simulate --display-gpus use -- sh -c 'echo rank $RANK'",
          "rank 0", "rank 1")  # fmt: skip
    typed("apt-get purge --yes cuda-cluster", user="root")
    typed("type cuda-cluster", code=1)


def release():
    install, program, lines = blocks()
    wheels = HOME / "target/wheels"
    wheels.mkdir(parents=True)
    for wheel in pathlib.Path("/lab/wheels").glob("cuda_cluster-*"):
        shutil.copy(wheel, wheels)
    subprocess.run(["chown", "-R", "ann:", HOME], check=True)
    typed("python3 -m venv demo")
    typed(install[0])
    check("pip has installed the program", str(HOME / "demo/bin/cuda-cluster"),
          lambda: str(next(HOME.glob("demo/bin/cuda-cluster"))))
    for command in program:
        # These show what is live, until one ends them.
        if not re.search(r" (top|dashboard|logs)\b", command):
            typed(here(command))
    for command in install[1:]:
        typed(here(command))
    (HOME / "lines.py").write_text(here(lines))
    typed("cat lines.py; python lines.py", "\n3\n")
    check("no process of a cluster and no shared memory is left", (set(), []),
          lambda: (guest.processes(), os.listdir("/dev/shm")))


if __name__ == "__main__":
    os.makedirs("/run/user/1000", mode=0o700, exist_ok=True)
    shutil.chown("/run/user/1000", "ann", "ann")
    os.chmod("/dev/shm", 0o1777)
    table.run([machine_itself, package, release], wanted=())
