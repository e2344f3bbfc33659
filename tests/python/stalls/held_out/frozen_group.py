"""The control group of a rank's decoder has been frozen."""

import os
import subprocess

from team import RANK, Star

GROUP = "/sys/fs/cgroup/unified/held-out-frozen"


def decode_video():
    decoder = subprocess.Popen(["sh", "-c", "while :; do sleep 0.1; done"])
    os.makedirs(GROUP, exist_ok=True)
    with open(GROUP + "/cgroup.procs", "w") as f:
        f.write(str(decoder.pid))
    with open(GROUP + "/cgroup.freeze", "w") as f:
        f.write("1")
    return decoder.wait()


star = Star()
star.barrier()
if RANK == 1:
    decode_video()
star.barrier()
