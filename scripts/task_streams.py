"""Task streams of x + x.T with TCP and with `direct`, as Dask's dashboard shows them, as one picture in one scale.

    .venv/bin/python scripts/task_streams.py PICTURE.svg [SCALE [WORKERS]]

Both clusters run one after the other on this machine, each three times; the picture has the median run of each.
Red is a transfer between workers, other colours are tasks; a row is a worker's thread. Prints the seconds of all
runs. Needs what `scripts/workloads.sh` needs.
"""

import sys
import time
from html import escape
from pathlib import Path

import cloudpickle
from distributed import Client, wait
from distributed.diagnostics.task_stream import rectangles

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples/dask"))
import transpose  # noqa: E402

RUNS = 3
#: Of the picture, in pixels: all of it, a thread's row, and what is above and below the rows of a stream.
WIDTH, ROW, ABOVE, BELOW = 960, 12, 26, 26


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


def stream(title, records, began, seconds, top):
    """The lines of one stream, which begins at `top`, and where it ends."""
    drawn = rectangles(records, workers={}, start_boundary=began)
    rows = sorted(set(drawn["y"]))
    scale = WIDTH / (seconds * 1000)
    lines = [f'<text x="4" y="{top + 17}" font-size="13">{escape(title)}</text>']
    for middle, width, color, alpha, at in zip(*(drawn[name] for name in ("start", "duration", "color", "alpha", "y"))):
        x = (middle - width / 2 - began * 1000) * scale
        place = f'x="{x:.1f}" y="{top + ABOVE + rows.index(at) * ROW}" width="{max(0.3, width * scale):.1f}" height="{ROW - 2}"'
        lines.append(f'<rect {place} fill="{color}" fill-opacity="{alpha:g}"/>')
    bottom = top + ABOVE + len(rows) * ROW
    for second in range(int(seconds) + 1):
        x = second * 1000 * scale
        lines.append(f'<path d="M{x:.1f} {bottom}v4" stroke="#555"/>')
        lines.append(f'<text x="{x + 3:.1f}" y="{bottom + 12}" fill="#555">{second} s</text>')
    return lines, bottom + BELOW


def main(picture, scale=0.1, workers=4):
    cloudpickle.register_pickle_by_value(transpose)
    median = {}
    for protocol in ("tcp", "direct"):
        found = sorted(runs(protocol, scale, workers), key=lambda one: one[0])
        print(protocol, " ".join(f"{one[0]:.2f}" for one in found), "s", flush=True)
        median[protocol] = found[len(found) // 2]
    longest = max(one[0] for one in median.values())
    lines, top = [], 0
    for protocol, (took, began, records) in median.items():
        side = f"{transpose.size(scale)[0]:,}"
        title = f"x + x.T, {side} × {side}, {workers} workers on this machine, {protocol}: {took:.2f} s"
        more, top = stream(title, records, began, longest, top)
        lines += more
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" font-family="sans-serif" font-size="10">'
    Path(picture).write_text("\n".join([head, f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>', *lines, "</svg>", ""]))
    print(f"tcp / direct: {median['tcp'][0] / median['direct'][0]:.2f}")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    main(sys.argv[1], *(kind(value) for kind, value in zip((float, int), sys.argv[2:])))
