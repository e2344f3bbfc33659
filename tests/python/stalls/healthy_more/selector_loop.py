"""Ranks have a loop of their own over `selectors`, with a limit of 3 s; rank 0 sends after 10 s of computing."""

import selectors
import time

from team import RANK, Star

star = Star()
loop = selectors.DefaultSelector()
for link in star.links.values():
    loop.register(link, selectors.EVENT_READ)
while True:
    if RANK == 0:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            sum(range(10000))
        for link in star.links.values():
            link.send("go on")
    else:
        while not (ready := loop.select(3)):
            pass
        for key, _ in ready:
            key.fileobj.recv()
