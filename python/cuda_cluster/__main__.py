"""`python -m cuda_cluster …`: the program itself."""

import os
import sys

from cuda_cluster.program import program_path

if __name__ == "__main__":
    program = program_path()
    os.execv(program, [program, *sys.argv[1:]])
