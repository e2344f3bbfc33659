"""The ranks write into one database; who has begun waits 7 s for an answer in its transaction."""

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
    time.sleep(7)
    base.execute("commit")
    star.barrier()
