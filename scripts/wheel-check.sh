#!/usr/bin/env bash
# Installs what scripts/wheel.sh made where there is little else, and uses it there as the README's
# section on installing says. Ends with 1 if something does not hold.
#
#   scripts/wheel-check.sh            as root, with mmdebstrap, in ten minutes: the wheel in Debian 12 with
#                                     its Python, and in Ubuntu 22.04 and 24.04 by a user who isn't root;
#                                     package and tarball in Debian 11 (glibc 2.31); without a compiler,
#                                     Rust, hwloc or UCX
#   scripts/wheel-check.sh --short    the debug wheel in a new environment on this machine, with the
#                                     Dask of .venv: part of the tests
#   scripts/wheel-check.sh --source   what pip builds from an sdist has the files of the wheel; with the
#                                     network, in a few minutes
#
# Clusters run with processes, a network and shared memory of their own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'wheel-check: %s\n' "$*" >&2; exit 1; }

scratch=$(mktemp -d /tmp/ccw.XXXXXX)
trap 'rm -rf "$scratch"' EXIT

# The README's commands: `commands install`, `commands use`; and its program in Python.
commands() {
    local block
    block=$(awk -v RS= '/pip install "\$\(ls/' README.md | sed 's/^ *//')
    case $1 in install) grep '^pip ' <<<"$block" ;; use) grep -v '^pip ' <<<"$block" ;; esac
}
program() { sed -n '/^## Install/,/^## What/{/^```python/,/^```/{/^```/!p}}' README.md; }

# What is checked everywhere, for the shell that runs there: $here is a directory of its own.
# shellcheck disable=SC2016
checks='
passed=0 failed=0
check() {
    local sentence=$1 status=0
    shift
    timeout 300 "$@" >"$here/output" 2>&1 </dev/null || status=$?
    if [ "$status" = 0 ]; then passed=$((passed + 1)); echo "ok      $sentence"; return; fi
    failed=$((failed + 1)); echo "FAILED  $sentence ($status)"; tail -n 20 "$here/output" | sed "s/^/        /"
}
end() { echo "$passed passed, $failed failed"; [ "$failed" = 0 ]; }
bare() {
    check "there is no compiler, no Rust, no hwloc and no UCX" bash -c "
        ! type cc gcc clang rustc cargo && ! ldconfig -p | grep -E \"libhwloc|libucp\""
}
looks() {
    check "it says its version" cuda-cluster --version
    check "it looks at the machine" cuda-cluster topo
    check "it plans for another machine" cuda-cluster plan --topology dgx-h100 --enable-nvlink
    check "it runs a program for every GPU of another machine" bash -c "
        cuda-cluster run --topology dgx-h100 --simulate -- sh -c \"echo rank \\\$RANK\" | sort | tail -n 1 | grep \"rank 7\""
}
has() { # SHARE SBOM [PARTS]
    check "every command has a manual page" bash -c "
        commands=\$(cuda-cluster --help | sed -n \"/^Commands:/,/^\$/s/^  \\([a-z]\\+\\) .*/\\1/p\")
        [ -n \"\$commands\" ]
        for command in \$commands; do [ \$command = help ] || ls $1/man/man1/cuda-cluster-\$command.1* || exit 1; done"
    check "bash completes it" bash -c ". $1/bash-completion/completions/cuda-cluster && complete -p cuda-cluster"
    check "there are completions for zsh and fish" bash -c "
        ls $1/zsh/*/_cuda-cluster $1/fish/vendor_completions.d/cuda-cluster.fish"
    check "there is a list of what is in it" bash -c "for part in ${3:-tokio hwloc pyo3}; do grep --quiet \$part $2 || exit 1; done"
}
without_ucx() {
    check "the native engine says that it needs a libucp" bash -c "
        cuda-cluster up --topology dgx-h100 --simulate --name native >$here/native 2>&1
        status=\$?
        cat $here/native
        [ \$status = 1 ] && grep libucp $here/native && grep \"hint: install UCX\" $here/native"
}
nothing_left() {
    check "no process and no shared memory is left" bash -c "
        ! readlink /proc/[0-9]*/exe | grep -E \"cuda-cluster|python\" && ! ls -A /dev/shm | grep ."
}
use() {
    check "the README is true" bash -euxc ". $here/use"
    check "the README is true in Python" python "$here/program.py"
    check "its communication backend loads" python -c "
import distributed.comm.registry as registry
registry.get_backend(\"direct\")"
    nothing_left
}
'

# offline ROOT COMMANDS: runs them in ROOT as $user, with nothing that would outlive them.
user=root
offline() {
    local mapped=(--map-root-user) other=()
    # A namespace that root alone is in has no other user.
    [ "$user" = root ] || { mapped=() other=(--userspec="$user"); }
    # shellcheck disable=SC2016
    unshare "${mapped[@]}" --mount --pid --net --ipc --fork bash -euc '
        ip link set lo up
        mount -t proc proc "${1%/}/proc"
        mount -t sysfs -o ro sysfs "${1%/}/sys"
        mount -t tmpfs tmpfs "${1%/}/dev/shm"
        cd "${1%/}$3/source"
        exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME="$3" XDG_RUNTIME_DIR="$3" LANG=C.UTF-8 here="$3" \
            chroot "${@:4}" "$1" bash -c "cd $3/source; $2"
    ' offline "$1" "$checks$2" "$here" "${other[@]}"
}

if [ "${1:-}" = --short ]; then
    if ! unshare --map-root-user --mount --pid --net --ipc --fork true 2>/dev/null; then
        echo "SKIPPED this user may make no namespaces"
        exit
    fi
    scripts/wheel.sh --debug >/dev/null
    here=$scratch
    mkdir "$here/source"
    commands use >"$here/use"
    program >"$here/program.py"
    "$(.venv/bin/python -c 'import sys; print(sys._base_executable)')" -m venv "$here/demo"
    "$here/demo/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps target/wheels/debug/*.whl
    packages=$(echo "$here"/demo/lib/python3*/site-packages)
    realpath .venv/lib/python3*/site-packages >"$packages/tests.pth"
    offline / "
        export PATH=$here/demo/bin:\$PATH VIRTUAL_ENV=$here/demo
        looks
        has $here/demo/share $packages/cuda_cluster-*.dist-info/sboms/cuda-cluster.cyclonedx.json tokio
        use
        end"
    exit
fi

if [ "${1:-}" = --source ]; then
    scripts/wheel.sh --debug >/dev/null
    export MATURIN_PEP517_ARGS="--profile dev --strip false" CARGO_TARGET_DIR=$PWD/target/wheel/source
    python3 -m venv "$scratch/venv"
    "$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check build
    "$scratch/venv/bin/python" -m build --sdist --outdir "$scratch" . >"$scratch/log" 2>&1 ||
        fail "no sdist: $(tail -n 5 "$scratch/log")"
    "$scratch/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
        --wheel-dir "$scratch" "$scratch"/*.tar.gz
    files() { python3 -m zipfile --list "$1" | awk 'NR > 1 { print $1 }' | sort; }
    for module in _comm.abi3.so _comm.cpython-310-; do
        files "$scratch"/*.whl | grep --quiet "$module" || fail "$module is not in the wheel from an sdist"
    done
    diff <(files "$scratch"/*.whl) <(files target/wheels/debug/*.whl) || fail "the wheel from an sdist is another"
    echo "the wheel from an sdist has $(files "$scratch"/*.whl | wc -l) files, as that of scripts/wheel.sh"
    exit
fi

[ "$(id -u)" -eq 0 ] || fail "needs root, to make a Debian in a directory"
wheel=$(ls target/wheels/cuda_cluster-*.whl) || fail "there is no wheel: scripts/wheel.sh"
package=$(ls target/dist/*.deb) || fail "there is no package: scripts/wheel.sh"
work=$PWD/target/wheel
here=/root

# machine NAME RELEASE [PACKAGES]: a new Debian or Ubuntu with little in it, for $user, whose home is $here.
machine() {
    scripts/system.sh "$2" "$work/check-$2" "${3:-}"
    cp -a "$work/check-$2" "$scratch/$1"
    [ "$user" = root ] || chroot "$scratch/$1" useradd --create-home --shell /bin/bash "$user"
    mkdir -p "$scratch/$1$here/source/target" "$scratch/$1/dev/shm"
    chmod 1777 "$scratch/$1/dev/shm"
    cp -r target/wheels target/dist "$scratch/$1$here/source/target/"
    commands use >"$scratch/$1$here/use"
    program >"$scratch/$1$here/program.py"
    chroot "$scratch/$1" chown -R "$user:" "$here"
}
# online NAME COMMANDS: runs them there as $user, with this machine's network.
online() {
    mkdir -p "$scratch/$1/etc/ssl/certs"
    cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$scratch/$1/etc/ssl/certs/ca-certificates.crt"
    cp /etc/resolv.conf "$scratch/$1/etc/resolv.conf"
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME="$here" PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1 chroot --userspec="$user" "$scratch/$1" bash -euc "cd $here/source; $2"
}
status=0

echo "$(basename "$wheel") in Debian 12"
machine twelve bookworm python3,python3-venv
online twelve "
    python3 -m venv /root/demo; . /root/demo/bin/activate; $(commands install); deactivate
    python3 -m venv /root/ucx; /root/ucx/bin/pip install \"\$(ls target/wheels/cuda_cluster-*.whl)[ucx]\""
offline "$scratch/twelve" '
    bare
    export PATH=/root/demo/bin:$PATH VIRTUAL_ENV=/root/demo
    looks
    has /root/demo/share "$(ls /root/demo/lib/python3*/site-packages/cuda_cluster-*.dist-info/sboms/cuda-cluster*)"
    without_ucx
    use
    unset VIRTUAL_ENV
    PATH=${PATH#*:}
    check "without an active environment it uses the Dask that it was installed with" bash -c "
        /root/demo/bin/cuda-cluster up --engine dask --topology dgx-1-v100 --simulate --name own --detach &&
        /root/demo/bin/cuda-cluster down own"
    check "with libucx every pair of workers of the native engine is checked" bash -c "
        /root/ucx/bin/cuda-cluster up --ucx auto --topology dgx-1-v100 --simulate --verify --name native --detach &&
        /root/ucx/bin/cuda-cluster down native"
    check "pip uninstalls all of it" bash -c "
        /root/ucx/bin/pip uninstall --quiet --yes cuda-cluster && ! find /root/ucx -name \"*cuda[-_]cluster*\" | grep ."
    end' || status=1

for ubuntu in 22.04:jammy 24.04:noble; do
    echo "$(basename "$wheel") in Ubuntu ${ubuntu%:*}, by a user who isn't root"
    user=ann here=/home/ann
    machine "${ubuntu#*:}" "${ubuntu#*:}" passwd,python3,python3-venv
    online "${ubuntu#*:}" "python3 -m venv ~/demo; . ~/demo/bin/activate; $(commands install)"
    # shellcheck disable=SC2016
    offline "$scratch/${ubuntu#*:}" '
        bare
        export PATH=$HOME/demo/bin:$PATH VIRTUAL_ENV=$HOME/demo
        looks
        without_ucx
        use
        end' || status=1
    rm -rf "${scratch:?}/${ubuntu#*:}"
done
user=root here=/root

echo "$(basename "$package") and the tarball in Debian 11"
machine eleven bullseye
mkdir "$scratch/eleven/opt/tar"
tar -C "$scratch/eleven/opt/tar" --strip-components=1 -xJf target/dist/*.tar.xz
offline "$scratch/eleven" '
    bare
    check "dpkg installs it" dpkg --install /root/source/target/dist/'"$(basename "$package")"'
    looks
    has /usr/share /usr/share/doc/cuda-cluster/cuda-cluster.cyclonedx.json
    without_ucx
    nothing_left
    check "dpkg removes all of it" bash -c "dpkg --purge cuda-cluster && ! find /usr -name \"*cuda-cluster*\" | grep ."
    PATH=/opt/tar/bin:$PATH
    hash -r
    looks
    has /opt/tar/share /opt/tar/share/doc/cuda-cluster/cuda-cluster.cyclonedx.json
    end' || status=1
exit "$status"
