"""A rank waits by inotify for the files that its child leaves in a folder, one every 9 s."""

import ctypes
import os
import subprocess
import tempfile

from team import RANK, Star

CREATED = 0x100
star = Star()
if RANK == 1:
    libc = ctypes.CDLL(None)
    folder = tempfile.mkdtemp()
    watch = libc.inotify_init()
    libc.inotify_add_watch(watch, folder.encode(), CREATED)
    subprocess.Popen(["sh", "-c", f"i=0; while sleep 9; do i=$((i+1)); : > {folder}/$i; done"])
while True:
    if RANK == 1:
        os.read(watch, 4096)
    star.barrier()
