"""A rank reads what its child writes, until the end, which never comes: it has the pipe's other end open itself."""

import os

from crew import RANK, Tree


def collect():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"result")
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as stream:
        result = stream.read()
    os.close(writer)
    return result


tree = Tree()
for step in range(20):
    if RANK == 2 and step == 10:
        collect()
    tree.total(step)
