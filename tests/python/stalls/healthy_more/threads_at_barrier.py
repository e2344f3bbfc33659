"""Four threads of a rank meet at a barrier; one hashes for 9 s."""

import hashlib
import threading
import time

from team import RANK, Star


def hashes():
    while True:
        end = time.monotonic() + 9
        while time.monotonic() < end:
            hashlib.sha256(bytes(1 << 22)).digest()
        meeting.wait()


def waits():
    while True:
        meeting.wait()


star = Star()
meeting = threading.Barrier(4)
if RANK == 1:
    for work in (hashes, waits, waits):
        threading.Thread(target=work, daemon=True).start()
while True:
    if RANK == 1:
        meeting.wait()
    star.barrier()
