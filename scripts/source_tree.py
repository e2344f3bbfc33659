"""Has Python know the package in the source tree as it knows an installed one.

Dask finds direct:// by an entry point, which is looked for in the metadata of packages. This writes the
tree's beside the package, from pyproject.toml and Cargo.toml; git does not have it, and wheels have their
own. `scripts/setup.sh --tests` runs this, and tests do.
"""

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    wanted = {
        "METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n",
        "entry_points.txt": "\n".join(lines) + "\n",
    }
    name = project["name"].replace("-", "_")
    folder = ROOT / "python" / f"{name}-{version}.dist-info"
    for other in folder.parent.glob(f"{name}-*.dist-info"):
        if other != folder:
            shutil.rmtree(other)
    folder.mkdir(exist_ok=True)
    for file, text in wanted.items():
        path = folder / file
        if not path.exists() or path.read_text() != text:
            # Others may read it at this moment, or write the same.
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(text)
            written.rename(path)


main()
