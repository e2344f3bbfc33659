"""Slow jobs in which nothing is wrong, by name: `healthy.py NAME`."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from meet import RANK, meet

HERE = Path(os.environ["STALLS_FOLDER"])


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hashlib.sha256(b"x" * (1 << 20)).digest()


def computes() -> None:
    compute(1.0)


def sleeps_between_steps() -> None:
    time.sleep(1.5)


def one_is_slow() -> None:
    if RANK == 1:
        compute(8.0)


def writes_files() -> None:
    path = HERE / f"rank{RANK}"
    for _ in range(8):
        path.write_bytes(os.urandom(4 << 20))


def has_helpers() -> None:
    work = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", work], check=True)


def is_woken_by_a_thread() -> None:
    here, there = os.pipe()

    def wake() -> None:
        time.sleep(7)
        os.write(there, b"x")

    threading.Thread(target=wake, daemon=True).start()
    os.read(here, 1)
    os.close(here)
    os.close(there)


def stops_its_child_for_moments() -> None:
    work = "import time; end = time.process_time() + 1\nwhile time.process_time() < end: pass"
    child = subprocess.Popen([sys.executable, "-c", work])
    while child.poll() is None:
        child.send_signal(signal.SIGSTOP)
        time.sleep(1)
        child.send_signal(signal.SIGCONT)
        time.sleep(0.3)


STEPS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        computes,
        sleeps_between_steps,
        one_is_slow,
        writes_files,
        has_helpers,
        is_woken_by_a_thread,
        stops_its_child_for_moments,
    )
}


def main() -> None:
    world = meet()
    while True:
        STEPS[sys.argv[1]]()
        world.all_reduce(1.0)


if __name__ == "__main__":
    main()
