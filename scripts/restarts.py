"""Measures how long a job is away when a rank is killed: `restarts.py [--plain] [-o json] [ROUNDS]`.

Eight ranks meet and work together. Rank 5 gets SIGKILL from here; measured is the time from then until
all ranks of the next start have done their first sum together. Then the job ends well. In a last job of
each launcher, not measured, rank 5 is killed once more than it may be started again.

The turns of the launchers alternate. With `-o json` nothing is judged, for a test that does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from programs import BUILT, Trial, until

RANKS = 8
VICTIM = 5
#: Which modules a program needs; what is in a rank before its first line says whether it was forked.
MODULES = {"torch": "torch", "plain": "json,decimal"}

#: What every rank does, when it can `total` a number over all ranks. The first sum is what is measured.
#: The ranks then work in steps, so that those that were not killed see it, as in a training. They end
#: together when they are told to.
WORK = """
    def done(warm, total, rank, folder):
        if total(1) != int(os.environ["WORLD_SIZE"]):
            sys.exit("a rank is missing")
        met = time.monotonic()
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        said = {"pid": os.getpid(), "met": met, "warm": warm}
        path = f"{folder}/{restart}-{rank}"
        with open(path + ".part", "w") as file:
            json.dump(said, file)
        os.rename(path + ".part", path)
        while not total(int(os.path.exists(f"{folder}/enough"))):
            time.sleep(0.05)
"""

PROGRAMS = {
    "torch": """
    import sys
    warm = "torch" in sys.modules
    import json, os, time
    import torch, torch.distributed as ranks
    {work}
    ranks.init_process_group("gloo")
    def total(number):
        everybody = torch.tensor([number])
        ranks.all_reduce(everybody)
        return int(everybody)
    done(warm, total, ranks.get_rank(), sys.argv[-1])
    """,
    # Rank 0 takes a number of each other one, and tells all of them the sum.
    "plain": """
    import sys
    warm = "decimal" in sys.modules
    import decimal, json, os, socket, time
    {work}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    def read(peer):
        byte = peer.recv(1)
        if not byte:
            sys.exit("a rank is gone")
        return byte[0]
    if rank == 0:
        listener = socket.create_server(place)
        peers = [listener.accept()[0] for _ in range(size - 1)]
    else:
        while True:
            try:
                root = socket.create_connection(place)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
    def total(number):
        if rank != 0:
            root.sendall(bytes([number]))
            return read(root)
        everybody = number + sum(read(peer) for peer in peers)
        for peer in peers:
            peer.sendall(bytes([everybody]))
        return everybody
    done(warm, total, rank, sys.argv[-1])
    """,
}


def program(which: str) -> str:
    work = textwrap.indent(textwrap.dedent(WORK), "    ")
    return textwrap.dedent(PROGRAMS[which].format(work=work))


def launchers(which: str, path: Path) -> dict[str, list[str]]:
    """Each launcher with the command that starts the ranks once more, at most."""
    python = [sys.executable, str(path)]
    ours = [os.environ.get("CUDA_CLUSTER_BIN", str(BUILT / "cuda-cluster")), "run"]
    ours += ["--topology", "dgx-h100", "--simulate", "-n", str(RANKS), "--ready-within", "10m"]
    ours += ["--restarts", "1"]
    found = {
        "run --restarts": [*ours, "--", *python],
        "run --restarts --warm": [*ours, "--warm", MODULES[which], "--", *python],
    }
    if which == "torch":
        # By itself torchrun 2.15 lends the ranks its own store, and none of its jobs came back (4 of 4
        # seen): ranks of the next start connected to addresses that refused. With a store of the
        # ranks' own they do.
        own_store = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
        torchrun += [f"--nproc-per-node={RANKS}", str(path)]
        return {"torchrun, ranks' own store": [*own_store, *torchrun], **found}
    return found


class Job(Trial):
    """A launcher with eight ranks, of which one is killed."""

    def ranks(self, restart: int) -> list[dict[str, float]]:
        """What the ranks of a start have said; all of them, if they have met."""
        files = [self.folder / f"{restart}-{rank}" for rank in range(RANKS)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def met(self, restart: int) -> list[dict[str, float]]:
        """The same when all have met, or when they can't any more."""
        gone = lambda: self.process.poll() is not None
        until(lambda: len(self.ranks(restart)) == RANKS or gone(), 300)
        return self.ranks(restart)

    def kill(self, restart: int) -> float:
        """Kills a rank when all have met and worked a while, and says when."""
        ranks = self.met(restart)
        if len(ranks) < RANKS:
            sys.exit(f"start {restart}: {len(ranks)} of {RANKS} ranks met\n{self.said()}")
        victim = ranks[VICTIM]
        time.sleep(1)
        now = time.monotonic()
        os.kill(int(victim["pid"]), signal.SIGKILL)
        return now

    def code(self) -> int | None:
        return self.end(120)


def measured(command: list[str], env: dict[str, str]) -> dict[str, object]:
    """One turn: how long the job was away, and how it ended."""
    with Job(command, "restart", env) as job:
        killed = job.kill(0)
        back = job.met(1)
        (job.folder / "enough").touch()
        all_are = len(back) == RANKS
        seen: dict[str, object] = {
            "away": max(rank["met"] for rank in back) - killed if all_are else None,
            "ranks": len({rank["pid"] for rank in back}),
            "forked": sum(bool(rank["warm"]) for rank in back),
            "code": job.code(),
            "left": job.left(),
        }
        if not all_are:
            print(*job.said().splitlines()[-100:], sep="\n", file=sys.stderr)
        return seen


def used_up(command: list[str], env: dict[str, str]) -> dict[str, object]:
    """How a job ends whose rank is killed once more than it may be started again."""
    with Job(command, "restart", env) as job:
        job.kill(0)
        if len(job.met(1)) == RANKS:
            job.kill(1)
        return {"code": job.code(), "left": job.left()}


def turns(which: str, rounds: int, folder: Path) -> dict[str, dict[str, list[dict[str, object]]]]:
    path = folder / "ranks.py"
    path.write_text(program(which))
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    commands = launchers(which, path)
    found: dict[str, dict[str, list[dict[str, object]]]] = {
        name: {"measured": [], "used up": []} for name in commands
    }
    todo: list[tuple[str, Callable[..., dict[str, object]]]] = [("measured", measured)] * rounds
    for kind, trial in [*todo, ("used up", used_up)]:
        for name, command in commands.items():
            seen = trial(command, env)
            print(f"{name}, {kind}: {json.dumps(seen)}", file=sys.stderr, flush=True)
            found[name][kind].append(seen)
    return found


def shown(found: dict[str, dict[str, list[dict[str, object]]]]) -> str:
    first = ""
    head = ["launcher", "came back", "away, s", "least", "most", "ratio", "forked", "ends with"]
    table = [[*head, "killed again", "left"]]
    table.append(["---"] * len(table[0]))
    base = 0.0
    for name, trials in found.items():
        away = [float(str(one["away"])) for one in trials["measured"] if one["away"] is not None]
        back = f"{len(away)} of {len(trials['measured'])}"
        away = away or [math.nan]
        median = statistics.median(away)
        first, base = first or name, base or median
        every = [one for kind in trials.values() for one in kind]
        codes = lambda kind, of=trials: "/".join(sorted({str(one["code"]) for one in of[kind]}))
        table.append([
            name, back, f"{median:.2f}", f"{min(away):.2f}", f"{max(away):.2f}", f"{base / median:.1f}",
            f"{min(int(str(one['forked'])) for one in trials['measured'])}",
            codes("measured"), codes("used up"), str(max(int(str(one["left"])) for one in every)),
        ])  # fmt: skip
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return f"{rows}\nratio: that of {first} / this one's; forked and left: ranks and processes, at worst"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=5, metavar="ROUNDS")
    parser.add_argument("--plain", action="store_true", help="ranks of plain Python")
    parser.add_argument("-o", choices=["table", "json"], default="table", dest="output")
    # What it has started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = parser.parse_args()
    which = "plain" if asked.plain else "torch"
    folder = Path(tempfile.mkdtemp(prefix="ccr", dir="/tmp"))
    try:
        found = turns(which, asked.rounds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.output == "json":
        print(json.dumps(found))
    else:
        print(f"{RANKS} ranks of {which}, SIGKILL of rank {VICTIM}, median of {asked.rounds}")
        print(shown(found))


if __name__ == "__main__":
    main()
