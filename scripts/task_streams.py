"""Task streams of x + x.T with TCP and with `direct`, as Dask's dashboard shows them, as pictures in one scale.

    .venv/bin/python scripts/task_streams.py FOLDER [SCALE [WORKERS]]

Both clusters run one after the other on this machine, each three times; the picture is that of the median run.
Red is a transfer between workers, other colours are tasks. Writes FOLDER/tcp.png and FOLDER/direct.png, and
prints the seconds of all runs. Needs chromium, and what `scripts/workloads.sh` needs.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
from bokeh.embed import file_html
from bokeh.resources import INLINE
from distributed import Client, wait
from distributed.diagnostics.task_stream import rectangles
from distributed.dashboard.components.scheduler import task_stream_figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples/dask"))
import transpose  # noqa: E402

RUNS = 3


def runs(protocol, scale, workers):
    """Seconds and records of each run."""
    from cuda_cluster.dask import LocalCUDACluster

    found = []
    options = {"topology": "dgx-1-v100", "simulate": True, "dashboard_address": None}
    with LocalCUDACluster(n_workers=workers, protocol=protocol, **options) as cluster, Client(cluster) as client:
        for turn in range(RUNS + 1):
            data = transpose.make(client, scale)
            began = time.time()
            sums = client.persist(data + data.T)
            wait(sums)
            took = time.time() - began
            records = client.get_task_stream(start=began)
            del data, sums
            if turn:
                found.append((took, began, records))
    return found


def draw(path, title, records, began, seconds):
    source, figure = task_stream_figure(sizing_mode="fixed", width=1100, height=260)
    source.data = rectangles(records, workers={}, start_boundary=began)
    source.data["start"] = [at - began * 1000 for at in source.data["start"]]
    figure.title.text, figure.toolbar_location = title, None
    figure.x_range.start, figure.x_range.end = 0, seconds * 1000
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(file_html(figure, INLINE, title))
        # As root chromium has no sandbox.
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1120,290"]
        command += [f"--screenshot={path}", "--virtual-time-budget=5000", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main(folder, scale=0.1, workers=4):
    cloudpickle.register_pickle_by_value(transpose)
    Path(folder).mkdir(parents=True, exist_ok=True)
    median = {}
    for protocol in ("tcp", "direct"):
        found = sorted(runs(protocol, scale, workers), key=lambda one: one[0])
        print(protocol, " ".join(f"{one[0]:.2f}" for one in found), "s", flush=True)
        median[protocol] = found[len(found) // 2]
    longest = max(one[0] for one in median.values())
    for protocol, (took, began, records) in median.items():
        title = f"x + x.T, {transpose.size(scale)[0]:,} x {transpose.size(scale)[0]:,}, {workers} workers, {protocol}: {took:.2f} s"
        draw(Path(folder, f"{protocol}.png").resolve(), title, records, began, longest)
    print(f"tcp / direct: {median['tcp'][0] / median['direct'][0]:.2f}")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    main(sys.argv[1], *(kind(value) for kind, value in zip((float, int), sys.argv[2:])))
