"""Pictures of the page beside those of Dask's and Ray's dashboards, while each cluster does the same work.

    pages_beside.py FOLDER [SYSTEM ...]     ours, native, dask, ray; without any, all for which there is what they need

Four workers of one thread each have tasks of 20 ms, whose results are added up in groups of 20, and one in 500 fails;
`native` runs tasks of its own instead. `PROGRAM` names cuda-cluster (target/release), `RAY` a Python that has
`ray[default]`. Only looks: nothing is compared by this program.
"""

import operator
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Browser

PROGRAM = os.environ.get("PROGRAM", "target/release/cuda-cluster")
RAY = os.environ.get("RAY", sys.executable)
WORKERS, GROUP, FAILS = 4, 20, 500
#: How long work goes on before its pictures, in seconds.
LASTS = 20


def part(number: int) -> int:
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        random.random()
    if number % FAILS == FAILS - 1:
        raise ValueError(f"no part {number}")
    if number % 100 == 0:
        print(f"part {number} is done", flush=True)
    return number


def total(numbers: list[int]) -> int:
    return sum(numbers)


def work_of_dask(address: str) -> None:
    from distributed import Client

    with Client(scheduler_file=address) if address.endswith(".json") else Client(address) as client:
        began, first, kept = time.monotonic(), 0, []
        while True:
            parts = client.map(part, range(first, first + 400), key=f"part-{first}")
            kept += [client.submit(total, parts[at : at + GROUP], pure=False) for at in range(0, 400, GROUP)]
            kept, first = kept[-200:], first + 400
            while sum(not one.done() for one in kept) > 20:
                time.sleep(0.1)
            if time.monotonic() - began > LASTS:
                print("now", flush=True)


def work_of_ray() -> None:
    # Its pages ask for a token otherwise.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    address = ray.init(num_cpus=WORKERS, include_dashboard=True, dashboard_port=0, log_to_driver=False)
    print(f"http://{address.dashboard_url}", flush=True)
    remote_part, remote_total = ray.remote(max_retries=0)(part), ray.remote(lambda *numbers: sum(numbers))
    began, first = time.monotonic(), 0
    while True:
        parts = [remote_part.remote(number) for number in range(first, first + 400)]
        totals = [remote_total.remote(*parts[at : at + GROUP]) for at in range(0, 400, GROUP)]
        ray.wait(totals, num_returns=len(totals))
        first += 400
        if time.monotonic() - began > LASTS:
            print("now", flush=True)


@contextmanager
def running(*command: str) -> Iterator[Iterator[str]]:
    """A program that goes on meanwhile; yields the lines that it says."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield iter(process.stdout)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def until(lines: Iterator[str], word: str) -> str:
    for line in lines:
        if word in line:
            return line.strip()
    raise SystemExit(f"it has ended without saying {word!r}")


def pictures(browser: Browser, folder: Path, system: str, pages: dict[str, str]) -> None:
    for page, address in pages.items():
        browser.size(1440, 1000)
        browser.open("about:blank")
        browser.open(address)
        time.sleep(8)
        browser.picture(folder / f"{system}-{page}.png")
        length = "document.documentElement.scrollHeight"
        browser.size(1440, min(6000, 140 + browser.script(f"return {length}")))
        time.sleep(3)
        browser.picture(folder / f"{system}-{page}-whole.png")
        print(f"{system}-{page}", flush=True)


@contextmanager
def our_cluster(engine: str) -> Iterator[tuple[str, str]]:
    """The page's link, and what work of Dask's reads."""
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        up = [
            PROGRAM,
            "up",
            "--topology",
            "dgx-h100",
            "--simulate",
            "--n-workers",
            str(WORKERS),
            "--name",
            "beside",
        ]
        python = ["--python", sys.executable] if engine == "dask" else []
        subprocess.run([*up, "--detach", "--engine", engine, *python], check=True, stdout=subprocess.DEVNULL)
        try:
            with running(PROGRAM, "dashboard", "--no-browser") as said:
                yield until(said, "http"), f"{runtime}/cuda-cluster/beside/scheduler.json"
        finally:
            subprocess.run([PROGRAM, "down", "beside"], check=True, stdout=subprocess.DEVNULL)


def ours(browser: Browser, folder: Path) -> None:
    with our_cluster("dask") as (link, file), running(sys.executable, __file__, "--work", file) as said:
        # The page measures from here on.
        browser.open(link)
        until(said, "now")
        pictures(
            browser,
            folder,
            "ours",
            {"page": link, "worker": link.partition("?")[0] + "#cluster=beside&worker=gpu1"},
        )


def native(browser: Browser, folder: Path) -> None:
    with our_cluster("native") as (link, _):
        browser.open(link)
        bench = [PROGRAM, "bench", "tasks", "beside", "--count", "20000", "--runs", "1000"]
        with running(*bench):
            time.sleep(LASTS)
            pictures(browser, folder, "native", {"page": link})


def dask(browser: Browser, folder: Path) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        link = operator.attrgetter("dashboard_link")(cluster).removesuffix("/status")
        with running(sys.executable, __file__, "--work", cluster.scheduler_address) as said:
            until(said, "now")
            names = {
                "status": "status",
                "workers": "workers",
                "info": "info/main/workers.html",
                "system": "system",
            }
            pictures(browser, folder, "dask", {name: f"{link}/{path}" for name, path in names.items()})


def ray(browser: Browser, folder: Path) -> None:
    with running(RAY, __file__, "--work", "ray") as said:
        link = until(said, "http")
        until(said, "now")
        names = {"overview": "overview", "cluster": "cluster", "jobs": "jobs", "logs": "logs"}
        pictures(browser, folder, "ray", {name: f"{link}/#/{path}" for name, path in names.items()})


SYSTEMS: dict[str, Callable[[Browser, Path], None]] = {
    "ours": ours,
    "native": native,
    "dask": dask,
    "ray": ray,
}


def main() -> None:
    if sys.argv[1] == "--work":
        return work_of_ray() if sys.argv[2] == "ray" else work_of_dask(sys.argv[2])
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for system in sys.argv[2:] or SYSTEMS:
        browser = Browser()
        try:
            SYSTEMS[system](browser, folder)
        finally:
            browser.end()


if __name__ == "__main__":
    main()
