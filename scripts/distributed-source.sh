#!/usr/bin/env bash
# Puts the installed distributed, with its tests, which are in no package, into a folder.
#
#   scripts/distributed-source.sh REPOSITORY FOLDER
#
# REPOSITORY is a clone of dask/distributed that has the tag of the installed version. PYTHON names the
# Python that has it (default: that of .venv).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repository=${1:?the path of a clone of dask/distributed} folder=${2:?where it is to be}
python=${PYTHON:-$here/.venv/bin/python}
export PYTHONDONTWRITEBYTECODE=1
installed=$("$python" -c 'import distributed; print(distributed.__path__[0])')
version=$("$python" -c 'import distributed; print(distributed.__version__)')
git -C "$repository" rev-parse --quiet --verify "$version^{commit}" >/dev/null || {
    echo "$repository is no clone of dask/distributed with the tag $version" >&2
    exit 2
}
cp -r "$installed" "$folder/distributed"
git -C "$repository" archive "$version" distributed conftest.py pyproject.toml |
    tar -x -C "$folder" --wildcards '*/tests' conftest.py pyproject.toml
