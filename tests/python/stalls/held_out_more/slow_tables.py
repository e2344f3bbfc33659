"""Fills its tables while it is imported, in a thread that needs the module itself (for import_lock.py)."""

import threading

SCALE = 2
rows = []


def fill():
    import slow_tables

    rows.extend(i * slow_tables.SCALE for i in range(10))


def prepare():
    thread = threading.Thread(target=fill, name="fill")
    thread.start()
    thread.join()


prepare()
