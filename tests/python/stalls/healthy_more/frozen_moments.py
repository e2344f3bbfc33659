"""The control group of a rank's child is frozen for a second out of three, as for copies of a container."""

import os
import subprocess
import sys
import time

from team import RANK, Star

GROUP = "/sys/fs/cgroup/unified/held-out-frozen"
WORK = "import time; end = time.process_time() + 5\nwhile time.process_time() < end: sum(range(10000))"


def put(name, value):
    with open(f"{GROUP}/{name}", "w") as f:
        f.write(value)


star = Star()
while True:
    if RANK == 1:
        child = subprocess.Popen([sys.executable, "-c", WORK])
        os.makedirs(GROUP, exist_ok=True)
        put("cgroup.procs", str(child.pid))
        while child.poll() is None:
            put("cgroup.freeze", "1")
            time.sleep(1)
            put("cgroup.freeze", "0")
            time.sleep(2)
    star.barrier()
