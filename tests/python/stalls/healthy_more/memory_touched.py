"""A rank makes and fills half a gigabyte again and again."""

import mmap

from team import RANK, Ring

ring = Ring()
while True:
    if RANK == 3:
        for _ in range(4):
            with mmap.mmap(-1, 512 << 20) as area:
                for i in range(0, 512 << 20, 4096):
                    area[i] = 1
    ring.barrier()
