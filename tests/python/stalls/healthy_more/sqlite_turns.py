"""The ranks write into one database; a transaction takes 5 s of computing."""

import os
import sqlite3
import tempfile
import time

from team import PORT, RANK, Star

base = sqlite3.connect(
    os.path.join(tempfile.gettempdir(), f"healthy-{PORT}.sqlite"), timeout=100, isolation_level=None
)
base.execute("create table if not exists runs (rank)")
star = Star()
while True:
    base.execute("begin immediate")
    base.execute("insert into runs values (?)", (RANK,))
    end = time.monotonic() + 5
    while time.monotonic() < end:
        sum(range(10000))
    base.execute("commit")
    star.barrier()
