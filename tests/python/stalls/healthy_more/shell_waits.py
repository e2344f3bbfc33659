"""One of the programs that shell_waits.sh has in the background: it computes for as long as it is told."""

import sys
import time

end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    sum(range(10000))
