"""A pool of threads computes checksums; the rank waits for all of them."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

from team import RANK, Star


def checksum(i):
    return hashlib.pbkdf2_hmac("sha256", b"data", b"salt", 3_000_000)


star = Star()
with ThreadPoolExecutor(3) as pool:
    while True:
        if RANK == 3:
            list(pool.map(checksum, range(6)))
        star.barrier()
