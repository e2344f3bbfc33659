"""One multiplication of big integers after another, each for seconds with the interpreter's lock."""

from team import RANK, Star

star = Star()
while True:
    if RANK == 1:
        len(range(pow(7, 3_000_000) % 1000))
        x = 3**4_000_000
        str(x % 10**4000)
    star.barrier()
