"""Prints Python's version and the installed distributions as JSON; imports none of them.

Run with `-S`, also by a Python that is too old for the rest; no import takes long. `importlib.metadata`
parses a file of each distribution, and files `*.pth` may import whole packages; both take longer than all
the rest. The names of directories say as much, and of such files only the directories that they add are
needed.
"""

import os
import site
import sys

#: Where `cuda_cluster.as_dask_cuda` has what stands for dask-cuda, without its storage and plugins.
STAND_IN = os.path.join("cuda_cluster", "_instead")


def add_directories(
    sitedir: "str | os.PathLike[str]", name: "str | os.PathLike[str]", known_paths: "set[str] | None"
) -> "set[str] | None":
    """In place of `site.addpackage`, which also executes what a file says."""
    try:
        with open(os.path.join(sitedir, name)) as file:
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return known_paths
    for line in map(str.strip, lines):
        if line and not line.startswith(("#", "import ", "import\t")):
            path = os.path.abspath(os.path.join(sitedir, line))
            if os.path.isdir(path) and path not in sys.path:
                sys.path.append(path)
    return known_paths


def distributions(path: str) -> "list[tuple[str, str]]":
    """The names and versions of what is installed at an entry of `sys.path`."""
    found: list[tuple[str, str]] = []
    if path.endswith(STAND_IN):
        return found
    try:
        entries = [entry for entry in os.scandir(path or ".") if entry.name[:1].isalnum()]
    except OSError:
        entries = []
    unclear = not entries and os.path.isfile(path)
    for entry in entries:
        stem, suffix = os.path.splitext(entry.name)
        if suffix == ".dist-info" and os.path.isfile(os.path.join(entry.path, "METADATA")):
            name, _, version = stem.rpartition("-")
            found.append((name, version))
        unclear = unclear or suffix in (".egg-info", ".egg-link")
    if unclear:
        # Not every name of these has a version.
        from importlib import metadata

        for one in metadata.distributions(path=[path]):
            if one.metadata["Name"]:
                found.append((one.metadata["Name"], one.version))
    return found


def written(text: str) -> str:
    """A text in JSON, for which the module would take as long as everything else."""
    escaped: dict[int, str] = {0x22: '\\"', 0x5C: "\\\\"} | {code: f"\\u{code:04x}" for code in range(32)}
    return f'"{text.translate(escaped)}"'


site.addpackage = add_directories
site.main()
packages: "dict[str, str]" = {}
for path in sys.path:
    for name, version in distributions(path):
        # The first on the path is the one that an import finds.
        packages.setdefault(name.lower().replace("_", "-"), version)
items = ", ".join(f"{written(name)}: {written(version)}" for name, version in packages.items())
version, prefix = written(sys.version.split()[0]), written(sys.prefix)
print(f'{{"version": {version}, "prefix": {prefix}, "packages": {{{items}}}}}')
