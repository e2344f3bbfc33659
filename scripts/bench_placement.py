"""Merge by learned bandwidth against merge in turn; see bench-placement.sh."""

import contextlib
import json
import os
import statistics
import subprocess
import tempfile

BINARY = os.environ["BINARY"]
PAIRS = int(os.environ["PAIRS"])
POLICIES = ("estimated-finish", "round-robin")

# Bytes per second within a half and between the halves: slow enough that transfers take most of
# the time on any machine.
NEAR, FAR = 10e6, 1e6

# Workers, parts of each table, rows of each part. What placement can win is the way of the tables
# to their splits, unless their number is a multiple of the workers': then taking turns meets by
# accident the worker that made them. The last line shows that.
SIZES = [(3, 5, 20_000), (4, 5, 20_000), (4, 11, 10_000), (4, 17, 10_000), (8, 13, 10_000), (4, 12, 10_000)]


def call(*arguments: str) -> str:
    """What the program prints; its messages are of interest only if it fails."""
    done = subprocess.run([BINARY, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    return done.stdout


@contextlib.contextmanager
def cluster(workers: int, placement: str):
    """A cluster whose links are slowed down, by name."""
    name = f"bench-{placement}-{os.getpid()}"
    machine = ["--topology", "dgx-1-v100", "--simulate", "--n-workers", str(workers)]
    plan = json.loads(call("plan", *machine, "--name", name, "-o", "json"))
    names = [worker["name"] for worker in plan["workers"]]
    half = dict.fromkeys(names[: (workers + 1) // 2], 0)
    rate = lambda a, b: NEAR if half.get(a, 1) == half.get(b, 1) else FAR
    options = plan["engine"]["native"]
    # What the real machine's links carry is of no use here.
    options.pop("gb_per_s", None)
    options["placement"] = placement
    options["simulated_links"] = {
        to: {source: rate(source, to) for source in names if source != to} for to in names
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        call("up", "--plan", file.name, "--detach")
    try:
        yield name
    finally:
        call("down", name)


def merge(name: str, parts: int, rows: int) -> float:
    """Seconds of one merge of new tables, which nobody has copies of yet."""
    sizes = ["--parts", str(parts), "--rows", str(rows), "--runs", "1"]
    return json.loads(call("bench", "merge", name, *sizes, "-o", "json"))["runs"][0]["seconds"]


def main() -> None:
    print(f"{'workers':>7} {'parts':>5} {'MB':>6} {'learned':>10} {'in turn':>10} {'times':>6}  pairs won")
    for workers, parts, rows in SIZES:
        with contextlib.ExitStack() as stack:
            names = [stack.enter_context(cluster(workers, policy)) for policy in POLICIES]
            for name in names:
                # The first one teaches the scheduler what the links can do.
                merge(name, parts, rows)
            runs = [[merge(name, parts, rows) for name in names] for _ in range(PAIRS)]
        learned, in_turn = (statistics.median(column) for column in zip(*runs))
        won = sum(one < other for one, other in runs)
        megabytes = 2 * parts * rows * 16 / 1e6
        print(
            f"{workers:7} {parts:5} {megabytes:6.1f} {learned:8.3f} s {in_turn:8.3f} s"
            f" {in_turn / learned:6.2f}  {won} of {PAIRS}",
            flush=True,
        )


if __name__ == "__main__":
    main()
