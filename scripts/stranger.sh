#!/usr/bin/env bash
# Types what the README tells a user to type, from what scripts/wheel.sh made, in a Debian or Ubuntu with
# little in it, by a user who isn't root (scripts/lab/stranger.py). Shows each command with all that it says,
# which stays in target/wheel/stranger-RELEASE.log. Ends with 1 if something does not hold.
#
#   scripts/stranger.sh [RELEASE]...              as root, with mmdebstrap; default: bookworm noble
#   scripts/stranger.sh --fill ROOT TARGET VERSION    only puts into a root what stranger.py needs there: the
#                                                 wheel with all for Dask in that Python's version, the
#                                                 package, and the user; TARGET is where wheel.sh's folders are
#
# Clusters run with processes, a network and shared memory of their own. For Arm there is arm-check.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'stranger: %s\n' "$*" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || fail "needs root, to make a Debian in a directory"

fill() { # ROOT TARGET VERSION
    local wheel package platform
    wheel=$(ls "$2"/wheels/cuda_cluster-*.whl) || fail "there is no wheel: scripts/wheel.sh"
    package=$(ls "$2"/dist/*.deb) || fail "there is no package: scripts/wheel.sh"
    platform=${wheel##*-manylinux_2_28_}
    platform=${platform%.whl}
    rm -rf "$1/lab"
    mkdir "$1/lab"
    cp scripts/lab/*.py README.md "$package" "$1/lab/"
    python3 -m pip download --quiet --disable-pip-version-check --only-binary=:all: --dest "$1/lab/wheels" \
        --platform "manylinux_2_28_$platform" --platform "manylinux2014_$platform" --python-version "$3" \
        "${wheel}[dask]"
    # By hand: its programs may be another processor's.
    echo ann:x:1000:1000::/home/ann:/bin/bash >>"$1/etc/passwd"
    echo ann:x:1000: >>"$1/etc/group"
    mkdir "$1/home/ann"
    chown 1000:1000 "$1/home/ann"
}

if [ "${1:-}" = --fill ]; then
    [ $# -eq 4 ] || fail "--fill needs a root, a folder and a version; see the top of $0"
    fill "${@:2}"
    exit
fi
scratch=$(mktemp -d /tmp/ccs.XXXXXX)
trap 'rm -rf "$scratch"' EXIT
[ $# -gt 0 ] || set -- bookworm noble
status=0
for release; do
    base=$PWD/target/wheel/stranger-$release root=$scratch/$release
    scripts/system.sh "$release" "$base" python3,python3-venv,libucx0,procps
    cp -a "$base" "$root"
    fill "$root" target "$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    mkdir -p "$root/dev/shm"
    # shellcheck disable=SC2016
    unshare --mount --pid --net --ipc --fork --kill-child bash -euc '
        ip link set lo up
        mount --rbind /dev "$1/dev"
        mount -t tmpfs tmpfs "$1/dev/shm"
        mount -t proc proc "$1/proc"
        mount -t sysfs -o ro sysfs "$1/sys"
        exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
            chroot "$1" python3 -B /lab/stranger.py
    ' stranger "$root" </dev/null 2>&1 | tee "$base.log" || status=1
    grep -q '^[0-9]* passed, 0 failed' "$base.log" || status=1
    rm -rf "$root"
done
exit "$status"
