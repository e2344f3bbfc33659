"""A rank has begun to write into a database and waits for the others; one of them waits to write, too."""

import os
import sqlite3
import tempfile

from team import PORT, RANK, Star


def open_database():
    path = os.path.join(tempfile.gettempdir(), f"held-out-{PORT}.sqlite")
    base = sqlite3.connect(path, timeout=100000, isolation_level=None)
    base.execute("create table if not exists runs (step, loss)")
    return base


def record(base, step):
    base.execute("begin immediate")
    base.execute("insert into runs values (?, 0.5)", (step,))


star = Star()
base = open_database()
star.barrier()
if RANK == 3:
    record(base, 1)
star.barrier()
if RANK == 1:
    record(base, 2)
star.barrier()
