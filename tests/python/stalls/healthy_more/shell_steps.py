"""A step of a job whose ranks are scripts of a shell (started by shell_steps.sh)."""

import time

end = time.monotonic() + 3
while time.monotonic() < end:
    sum(range(10000))
