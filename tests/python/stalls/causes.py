"""A job in which something is wrong, by name: `causes.py NAME`. Rank 2 is the odd one."""

import asyncio
import concurrent.futures
import ctypes
import fcntl
import multiprocessing
import os
import queue
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from meet import RANK, SIZE, World, meet

#: The rank in which it is.
ODD = 2
HERE = Path(os.environ["STALLS_FOLDER"])


def stopped(world: World) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def other_collective(world: World) -> None:
    world.broadcast(1.0)


def sleeping(world: World) -> None:
    time.sleep(3600)


def own_lock(world: World) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def lock_order(world: World) -> None:
    one, other = threading.Lock(), threading.Lock()
    ready = threading.Barrier(2)

    def second() -> None:
        with other:
            ready.wait()
            with one:
                pass

    thread = threading.Thread(target=second, name="second")
    thread.start()
    with one:
        ready.wait()
        with other:
            pass


def queue_without_writer(world: World) -> None:
    queue.Queue().get()


def pipe_without_reader(world: World) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(b"x" * (1 << 20))
    child.stdin.flush()


def child_that_sleeps(world: World) -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"], check=True)


def child_that_is_stopped(world: World) -> None:
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    child = subprocess.Popen([sys.executable, "-c", stop], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()


def loader_that_sleeps(world: World) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(time.sleep, [3600, 3600])


def fork_with_a_lock(world: World) -> None:
    lock = threading.Lock()
    lock.acquire()
    child = os.fork()
    if not child:
        lock.acquire()
        os._exit(0)
    os.waitpid(child, 0)


def file_lock(world: World) -> None:
    path = HERE / "lock"
    holder = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(3600)"
    other = subprocess.Popen([sys.executable, "-c", holder, path], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def database_lock(world: World) -> None:
    path = HERE / "runs.db"
    holder = """
import sqlite3, sys, time
base = sqlite3.connect(sys.argv[1], isolation_level=None)
base.execute("begin exclusive")
print(flush=True)
time.sleep(3600)
"""
    other = subprocess.Popen([sys.executable, "-c", holder, path], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    sqlite3.connect(path, timeout=3600).execute("create table runs (step)")


def killed_in_a_task(number: int) -> None:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def pool_that_lost_a_task(world: World) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(killed_in_a_task, range(8), chunksize=1)


def silent_server(world: World) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    link = socket.create_connection(listener.getsockname())
    link.recv(1)


def interpreter_hog(world: World) -> None:
    def hog() -> None:
        # `ctypes.PyDLL` keeps the interpreter's lock.
        ctypes.PyDLL(None).sleep(3600)

    threading.Thread(target=hog, name="hog", daemon=True).start()
    time.sleep(0.1)


def busy(world: World) -> None:
    while True:
        pass


def import_lock(world: World) -> None:
    (HERE / "slow_module.py").write_text("import time\ntime.sleep(3600)\n")
    sys.path.insert(0, str(HERE))
    threading.Thread(target=__import__, args=("slow_module",), daemon=True).start()
    time.sleep(0.3)
    __import__("slow_module")


def barrier_of_wrong_size(world: World) -> None:
    barrier = threading.Barrier(2)
    barrier.wait()


def thread_join(world: World) -> None:
    thread = threading.Thread(target=time.sleep, args=(3600,), name="helper")
    thread.start()
    thread.join()


def two_ranks_in_a_circle(world: World) -> None:
    world.receive(0)


def named_pipe(world: World) -> None:
    path = HERE / "fifo"
    os.mkfifo(path)
    path.read_bytes()


def busy_interpreter(world: World) -> None:
    # One operation of the interpreter, without an end in sight.
    threading.Thread(target=lambda: 7 ** (7**11), name="hog", daemon=True).start()
    time.sleep(0.1)


def debugger(world: World) -> None:
    attach = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
assert libc.ptrace(16, int(sys.argv[1]), None, None) == 0
time.sleep(3600)
"""
    subprocess.Popen([sys.executable, "-c", attach, str(os.getpid())])
    time.sleep(3600)


def semaphore_of_a_sleeping_child(world: World) -> None:
    context = multiprocessing.get_context("fork")
    lock = context.Lock()
    child = context.Process(target=lambda: lock.acquire() and time.sleep(3600))
    child.start()
    time.sleep(0.3)
    lock.acquire()


def queue_of_processes(world: World) -> None:
    multiprocessing.get_context("fork").Queue().get()


def condition_without_notify(world: World) -> None:
    condition = threading.Condition()
    with condition:
        condition.wait()


def pool_that_waits_for_itself(world: World) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: pool.submit(int).result()).result()


def silent_server_by_select(world: World) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    link = socket.create_connection(listener.getsockname())
    select.select([link], [], [])


def event_of_asyncio(world: World) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    asyncio.run(wait())


def pipes_in_both_directions(world: World) -> None:
    echo = "import sys\nfor line in sys.stdin: print(line * 9, end='')"
    child = subprocess.Popen([sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(b"x\n" * (1 << 20))


CAUSES: dict[str, Callable[[World], None]] = {
    name: one
    for name, one in list(globals().items())
    if callable(one) and getattr(one, "__module__", "") == "__main__"
}


def main() -> None:
    world = meet()
    world.barrier()
    if RANK == ODD:
        CAUSES[sys.argv[1]](world)
    elif RANK == 0 and sys.argv[1] == "two_ranks_in_a_circle":
        world.receive(ODD)
    world.all_reduce(float(SIZE))


if __name__ == "__main__":
    main()
