"""A rank imports a module whose import waits for a thread that imports the same module."""

from crew import RANK, Tree


def load_tables():
    import slow_tables

    return slow_tables.SCALE


tree = Tree()
tree.meet()
if RANK == 3:
    load_tables()
tree.meet()
