#!/usr/bin/env bash
# Runs the Python package's tests from the wheel, in each Python that it is for: those of Debian's and
# Ubuntu's releases, each in a directory of its own, with the oldest and the newest Dask. Prints a
# table of what passed, failed and was skipped; ends with 1 if something failed.
#
#   scripts/pythons.sh [--short] [PYTHON ...]     for example 3.10 3.14; without any, all
#   --short                                       the files that use most of Dask and Python
#   WHEEL=FILE                                    another wheel than that of scripts/wheel.sh
#
# Needs root and mmdebstrap. The directories stay in target/wheel/roots, 5 GB in all. Takes a quarter of an
# hour for each line of the table on two cores; --short, three minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'pythons: %s\n' "$*" >&2; exit 1; }

# Python, where it is the usual one, and its package there.
machines=(
    "3.10 ubuntu jammy python3"
    "3.11 debian bookworm python3"
    "3.12 ubuntu noble python3"
    "3.13 debian trixie python3"
    "3.14 ubuntu resolute python3"
    "3.14 debian sid python3.14"
    "3.15 debian sid python3.15"
)
oldest=$(sed -n 's/^distributed==//p' tests/python/requirements-oldest.txt)
short=(dask_surface program keywords comm cluster)

files=(tests/python/test_*.py)
chosen=()
for argument in "$@"; do
    case $argument in
    --short) files=("${short[@]/#/tests/python/test_}") files=("${files[@]/%/.py}") ;;
    3.*) chosen+=("$argument") ;;
    *) fail "unknown argument $argument; see the top of $0" ;;
    esac
done
known=$(printf '%s\n' "${machines[@]}" | cut -d' ' -f1 | sort -Vu)
for python in "${chosen[@]}"; do
    grep -qx "$python" <<<"$known" || fail "no release has Python $python; there are: ${known//$'\n'/ }"
done
[ "$(id -u)" -eq 0 ] || fail "needs root, to make systems in directories"
wheel=${WHEEL:-$(ls target/wheels/cuda_cluster-*.whl)} || fail "there is no wheel: scripts/wheel.sh"
roots=$PWD/target/wheel/roots
mkdir -p "$roots"

# installed RELEASE PYTHON DASK: the wheel with what the tests need, in /opt/DASK there.
installed() {
    local root=$roots/$1 wanted=(numpy pandas)
    [ "$3" = "$oldest" ] && wanted=(numpy 'pandas<3')
    wanted+=(pyarrow pytest pytest-timeout pytest-rerunfailures mypy types-PyYAML rich cryptography ipykernel ipywidgets nbclient libucx-cu13)
    [ "$3" = newest ] || wanted+=("dask==$3" "distributed==$3")
    mkdir -p "$root/source" "$root/wheel" "$root/etc/ssl/certs"
    rm -rf "$root/wheel"/* "${root:?}/source"
    mkdir "$root/source"
    cp "$wheel" "$root/wheel/"
    git ls-files -z | tar --null --files-from=- -c | tar -x -C "$root/source"
    cp --dereference "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/ca-certificates.crt"
    cp --dereference /etc/resolv.conf "$root/etc/resolv.conf"
    local name
    name=$(basename "$wheel")
    # shellcheck disable=SC2016
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1 PIP_NO_CACHE_DIR=1 chroot "$root" bash -euc '
        [ -x "$1/bin/python" ] || "$2" -m venv "$1"
        "$1/bin/python" -m pip install "/wheel/$3[dask]" "${@:4}"
        "$1/bin/python" -m pip install --force-reinstall --no-deps "/wheel/$3"
        ' install "/opt/$2-$3" "$2" "$name" "${wanted[@]}"
}

# tested RELEASE PYTHON DASK: runs the tests there, with no network but its own.
tested() {
    # shellcheck disable=SC2016
    unshare --mount --pid --net --ipc --fork bash -euc '
        ip link set lo up
        mount --rbind /dev "$1/dev"
        mount -t tmpfs tmpfs "$1/dev/shm"
        mount -t tmpfs tmpfs "$1/tmp"
        mount -t proc proc "$1/proc"
        mount -t sysfs -o ro sysfs "$1/sys"
        exec env -i PATH="$2/bin:/usr/sbin:/usr/bin:/sbin:/bin" HOME=/root LANG=C.UTF-8 VIRTUAL_ENV="$2" \
            CUDA_CLUSTER_INSTALLED=1 PYTHONDONTWRITEBYTECODE=1 chroot "$1" bash -uc "$3" tests "${@:4}"
    ' tests "$roots/$1" "/opt/$2-$3" "$inside" "${files[@]}"
}
# shellcheck disable=SC2016
inside='
cd /source
python -c "import platform, cuda_cluster, distributed
assert \"site-packages\" in cuda_cluster.__file__
print(\"== versions\", platform.python_version(), distributed.__version__)"
for file do
    echo "== $file"
    python -m pytest -q -rs --tb=short -p no:cacheprovider --timeout 900 "$file"
    echo "== ended with $?"
done'

# How many of a kind the summaries in a log count.
counted() { sed -nE "s/^(.* )?([0-9]+) $1.* in [0-9.]+s.*/\2/p" "$2" | awk '{ n += $1 } END { print n + 0 }'; }
# How many files ended without a summary.
broken() { grep -cE ' in [0-9.]+s( \([0-9:]+\))?$' "$1" | awk -v all="${#files[@]}" '{ print all - $1 }'; }

status=0 table=()
for machine in "${machines[@]}"; do
    read -r python distribution release package <<<"$machine"
    [ ${#chosen[@]} -eq 0 ] || printf '%s\n' "${chosen[@]}" | grep -qx "$python" || continue
    packages=python3,python3-venv,ca-certificates,iproute2,procps,libucx0
    [ "$release" = sid ] && packages+=,python3.14-venv,python3.15-venv
    scripts/system.sh "$release" "$roots/$release" "$packages"
    for dask in "$oldest" newest; do
        # Its metadata name Python 3.10 to 3.13.
        case $dask-$python in "$oldest"-3.14 | "$oldest"-3.15) continue ;; esac
        log=$roots/python-$python-$release-dask-$dask.log
        if ! installed "$release" "$package" "$dask" >"$log" 2>&1; then
            table+=("$python $distribution-$release $dask - - - it-does-not-install:-$log")
            status=1
            continue
        fi
        tested "$release" "$package" "$dask" >>"$log" 2>&1 || true
        versions=$(sed -n 's/^== versions //p' "$log")
        versions=${versions:-$python.? ?}
        passed=$(counted passed "$log") failed=$(($(counted failed "$log") + $(counted errors? "$log") + $(broken "$log")))
        table+=("${versions% *} $distribution-$release ${versions#* } $passed $failed $(counted skipped "$log") $log")
        [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ] || status=1
    done
done
echo
printf '%s\n' "PYTHON SYSTEM DISTRIBUTED PASSED FAILED SKIPPED LOG" "${table[@]//$PWD\//}" | column -t
grep -hE '^SKIPPED' "$roots"/python-*.log 2>/dev/null | sed -E 's/^SKIPPED \[[0-9]+\] //; s/:[0-9]+:/:/' | sort | uniq -c || true
exit "$status"
