"""A rank builds an extension: the compiler runs as a child of make's shell."""

import subprocess
import sys
import tempfile

from team import RANK, Ring

ring = Ring()
while True:
    if RANK == 3:
        folder = tempfile.mkdtemp()
        subprocess.run(
            [
                "sh",
                "-c",
                f"cp -r $(dirname $({sys.executable} -c 'import os; print(os.__file__)'))/asyncio {folder}/a; "
                f"for i in 1 2 3 4 5 6; do {sys.executable} -m compileall -f -q {folder}/a; done",
            ],
            check=True,
        )
    ring.barrier()
