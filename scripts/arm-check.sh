#!/usr/bin/env bash
# Runs what scripts/wheel.sh --target aarch64 made, and tests, on an emulated Arm processor. Prints a table
# of what held. Ends with 1 if something did not.
#
#   scripts/arm-check.sh [PART]...   as root, after scripts/setup.sh --arm and
#                                    scripts/wheel.sh --target aarch64; default: all parts
#
#   user       on this machine's kernel (qemu-user), which then lacks process_vm_readv, MADV_REMOVE and
#              subreapers: what needs none of them, and the words with which a cluster is refused
#   4k, 16k    on Debian 13's kernels for Arm, with pages of 4 and 16 KiB (qemu-system): clusters of
#              programs, of the native engine and of Dask, and the laws of memory (scripts/lab/arm.py)
#   stranger   on the kernel with pages of 4 KiB, in a Debian 13 with little in it: what the README tells a
#              user who isn't root to type, and the package by apt (scripts/lab/stranger.py); what was said
#              stays in target/aarch64/check/stranger
#   systems    on this machine's kernel, in Debian 13, 12 and 11 with little in them: the package by apt and
#              the tarball, and where Python is new enough the wheel with Dask, by a user who isn't root
#
# All of it stays in target/aarch64/check (3 GB); remove that for a newer Debian. An hour on two cores.
# Emulation shows logic, never speed, nor the order in which a real processor's stores are seen. GPUs are
# simulated. There is no kernel with pages of 64 KiB in Debian, and one PCI segment in QEMU's machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'arm-check: %s\n' "$*" >&2; exit 2; }

parts=("$@")
[ $# -gt 0 ] || parts=(user systems 4k 16k stranger)
for part in "${parts[@]}"; do
    # `inside` is this script again, in the Debian of scripts/arm.sh.
    case $part in user | systems | 4k | 16k | stranger | inside) ;; *) fail "no part $part; see the top of $0" ;; esac
done
[ "$(id -u)" -eq 0 ] || fail "needs root, to make a Debian in a directory"
wheel=$(echo target/aarch64/wheels/*.whl) package=$(echo target/aarch64/dist/*.deb)
tarball=$(echo target/aarch64/dist/*.tar.xz)
for file in "$wheel" "$package" "$tarball"; do
    [ -f "$file" ] || fail "there is no $file: run scripts/wheel.sh --target aarch64"
done
work=$PWD/target/aarch64/check
program=$work/program/bin/cuda-cluster
limit=${LAB_LIMIT:-3600}
mkdir -p "$work"

# Without the release's optimisation, by its compiler.
build_tests() {
    local crate built target=aarch64-unknown-linux-gnu zigcc=$PWD/target/aarch64/wheel/zigcc
    local variable=${target//-/_}
    export CARGO_TARGET_DIR=$PWD/target/aarch64/cargo
    declare -x "CARGO_TARGET_${variable^^}_LINKER=$zigcc" "CC_$variable=$zigcc"
    rm -rf "$work/tests"
    mkdir -p "$work/tests"
    for crate in data wire model; do
        built=$(cargo test --locked --quiet --target "$target" --package "cuda-cluster-$crate" \
            --no-default-features --lib --no-run --message-format json-render-diagnostics |
            sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
        aarch64-linux-gnu-strip --strip-debug -o "$work/tests/$crate" "$built"
    done
}

passed=0 failed=0
check() { # SENTENCE COMMAND...
    local sentence=$1 status=0 output limited=()
    shift
    [ "$(type -t "$1")" = function ] || limited=(timeout "$limit")
    output=$("${limited[@]}" "$@" 2>&1 </dev/null) || status=$?
    if [ "$status" = 0 ]; then
        passed=$((passed + 1))
        echo "passed   $sentence"
    else
        failed=$((failed + 1))
        printf 'FAILED   %s (%s)\n' "$sentence" "$status"
        tail -n 30 <<<"$output" | sed 's/^/         /'
    fi
    sed -n 's/^test result: \(.*\); finished.*/         \1/p' <<<"$output"
}
on_this_kernel() {
    export XDG_RUNTIME_DIR=$work
    check "the program and the wheel's module are for Arm" bash -ec "
        readelf -h $program | grep 'Machine: *AArch64'
        readelf -h $work/site/cuda_cluster/_comm.abi3.so | grep 'Machine: *AArch64'"
    check "the package, for arm64, and the wheel have the tarball's program" bash -ec "
        [ \"\$(dpkg-deb -f $package Architecture)\" = arm64 ]
        dpkg-deb --fsys-tarfile $package | tar -xO ./usr/bin/cuda-cluster | cmp - $program
        cmp $work/site/bin/cuda-cluster $program"
    check "it says its version" "$program" --version
    check "it looks at the machine" "$program" topo
    check "it plans for a machine with Arm processors" "$program" plan --topology gb300-nvl72-tray
    check "a cluster is refused in words, where there are no subreapers" bash -ec "
        ! $program run --topology rtx-4090-2 --simulate -- true 2>$work/refused
        grep 'cannot watch over processes here: adopting orphans' $work/refused || { cat $work/refused; exit 1; }"
    check "the tests of what is sent" "$work/tests/wire"
    check "the tests of what decides" "$work/tests/model"
    echo "$passed passed, $failed failed, 0 not run"
    [ "$failed" = 0 ]
}

if [ "${parts[0]}" = inside ]; then
    build_tests
    [ "${parts[1]:-}" != user ] || on_this_kernel
    exit
fi
for tool in qemu-system-aarch64:qemu-system-arm mmdebstrap:mmdebstrap cpio:cpio; do
    command -v "${tool%:*}" >/dev/null || fail "there is no ${tool%:*}: run scripts/setup.sh --arm"
done

# The tarball's program; the wheel with Dask and NVIDIA's UCX as for Debian 13's Python.
install_built() {
    rm -rf "$work/program" "$work/site"
    mkdir -p "$work/program"
    tar -C "$work/program" --strip-components=1 -xJf "$tarball"
    grep -E '^(dask|distributed|numpy|libucx-cu13)==' tests/python/requirements.txt |
        python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore \
            --no-compile --only-binary=:all: \
            --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --python-version 3.13 \
            --target "$work/site" -r /dev/stdin "$wheel"
    # What is for compilers.
    find "$work/site/libucx" -name '*.a' -delete
    # In seconds; on the emulated processor it takes minutes (scripts/lab/arm.py). The archive has no dates.
    if python3.13 -c '' 2>/dev/null; then
        python3.13 -m compileall -q --invalidation-mode unchecked-hash -x '/tests?/' "$work/site"
    fi
}

# Debian 13 for Arm. It is only unpacked: no program of it runs here.
root=$work/debian
make_root() {
    echo "arm-check: fetching Debian 13" >&2
    rm -rf "$root.new"
    # Mirrors and snapshots may be older than its lists are valid. They are signed all the same.
    local packages=base-files,bash,coreutils,dash,iproute2,libgomp1,libstdc++6,libucx0,procps,python3
    mmdebstrap --quiet --variant=extract --architectures=arm64 \
        --aptopt='Acquire::Check-Valid-Until "false"' \
        --include="busybox-static,linux-image-arm64,linux-image-arm64-16k,$packages" \
        trixie "$root.tar" >"$work/log" 2>&1 || fail "there is no Debian 13; see $work/log"
    mkdir "$root.new"
    tar -C "$root.new" -xf "$root.tar" --exclude='./dev/*' --exclude='./usr/lib/modules/*' \
        --exclude='./usr/share/doc/*' --exclude='./usr/share/locale/*'
    rm "$root.tar"
    mv "$root.new" "$root"
}
# All that the machine has, as one archive for the kernel: it needs no disk, and so no modules.
make_archive() {
    rm -rf "$root/lab"
    mkdir "$root/lab"
    cp -r scripts/lab/*.py "$program" "$work/site" "$work/tests" "$root/lab/"
    archive "$root"
}
archive() { # ROOT
    cp scripts/lab/start-arm "$1/init"
    (cd "$1" && find . \( -path ./boot -o -path ./var/lib/apt/lists -o -path ./var/cache/apt \) -prune \
        -o -print | cpio --quiet -o -H newc) >"$work/archive"
}
new_user() { # ROOT
    echo ann:x:1000:1000::/home/ann:/bin/bash >>"$1/etc/passwd"
    echo ann:x:1000: >>"$1/etc/group"
    mkdir "$1/home/ann"
    chown 1000:1000 "$1/home/ann"
}
# new_system RELEASE: a Debian with little in it.
new_system() {
    local packages=util-linux
    # What a user installs of whom the README asks nothing but Python; its UCX for the native engine.
    [ "$1" = bullseye ] || packages+=,python3,python3-venv
    [ "$1" != trixie ] || packages+=,busybox-static,iproute2,libucx0,procps
    ARCHITECTURE=arm64 scripts/system.sh "$1" "$work/$1" "$packages" >&2 ||
        fail "there is no Debian $1; see $work/$1.log"
    rm -rf "$work/$1.used"
    cp -a "$work/$1" "$work/$1.used"
}
make_stranger() {
    new_system trixie
    scripts/stranger.sh --fill "$work/trixie.used" target/aarch64 3.13
    archive "$work/trixie.used"
}
# shellcheck disable=SC2317  # `check` calls it
in_system() { # RELEASE USER COMMANDS
    mkdir -p "$work/$1.used/etc/ssl/certs"
    cp /etc/resolv.conf "$work/$1.used/etc/resolv.conf"
    cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$work/$1.used/etc/ssl/certs/ca-certificates.crt"
    # shellcheck disable=SC2016
    timeout "$limit" scripts/emulated.sh bash -euc '
        mount --rbind /dev "$1/dev"
        mount --rbind /sys "$1/sys"
        mount -t proc proc "$1/proc"
        exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME="$2" LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 \
            chroot --userspec="$3" "$1" bash -ec "cd; $4"
    ' in_system "$work/$1.used" "$([ "$2" = root ] && echo /root || echo "/home/$2")" "$2" "$3"
}
on_systems() {
    local release looks="cuda-cluster --version; cuda-cluster topo; cuda-cluster plan --topology gb300-nvl72-tray"
    passed=0 failed=0
    for release in trixie bookworm bullseye; do
        new_system "$release"
        new_user "$work/$release.used"
        cp "$wheel" "$package" "$work/$release.used/home/ann/"
        mkdir "$work/$release.used/home/ann/tar"
        tar -C "$work/$release.used/home/ann/tar" --strip-components=1 -xJf "$tarball"
        check "$release: apt installs the package" in_system "$release" root \
            "apt-get install --yes --no-install-recommends /home/ann/${package##*/}"
        check "$release: the package's program looks and plans" in_system "$release" ann "$looks"
        check "$release: apt removes all of it" in_system "$release" root \
            "apt-get purge --yes cuda-cluster; ! find / -xdev -path /home -prune -o -name '*cuda-cluster*' -print | grep ."
        check "$release: the tarball's program looks and plans" in_system "$release" ann \
            "PATH=\$HOME/tar/bin:\$PATH; $looks"
        if [ "$release" != bullseye ]; then
            check "$release: pip installs the wheel with Dask" in_system "$release" ann \
                "python3 -m venv demo; demo/bin/pip install --quiet './${wheel##*/}[dask]'"
            check "$release: the wheel's program looks and plans" in_system "$release" ann \
                ". demo/bin/activate; $looks; [ \$(command -v cuda-cluster) = \$HOME/demo/bin/cuda-cluster ]"
            check "$release: the wheel plans in Python, and Dask finds its communication" in_system "$release" ann '
                demo/bin/python -c "
import cuda_cluster, cuda_cluster.dask, distributed.comm.registry as registry
print(len(cuda_cluster.plan(topology=\"dgx-h100\").workers))
registry.get_backend(\"direct\")"'
        fi
        rm -rf "$work/$release.used"
    done
    echo "$passed passed, $failed failed, 0 not run"
    [ "$failed" = 0 ]
}
boot() { # PAGES KERNEL SUITE
    # Whatever ends this script ends the machine.
    # shellcheck disable=SC2054  # the commas are QEMU's
    local arguments=(
        -machine virt,gic-version=3 -cpu neoverse-n1 -accel tcg,thread=multi -smp 4 -m 6G
        -object memory-backend-ram,id=near,size=4G -object memory-backend-ram,id=far,size=2G
        -numa node,nodeid=0,cpus=0-1,memdev=near -numa node,nodeid=1,cpus=2-3,memdev=far
        -nodefaults -display none -no-reboot -serial stdio
        -kernel "$2" -initrd "$work/archive"
        -append "console=ttyAMA0 panic=-1 quiet nowatchdog lab.pages=$1 lab.suite=$3"
    )
    setpriv --pdeathsig TERM timeout --foreground --kill-after 5 "$limit" \
        setpriv --pdeathsig KILL nice -n 5 qemu-system-aarch64 "${arguments[@]}" </dev/null || true
}
on_a_kernel() { # NAME
    local kernel pages=4 suite=arm
    kernel=$(echo "$root"/boot/vmlinuz-*-arm64)
    case $1 in
        16k) pages=16 kernel+=-16k ;;
        stranger) suite=stranger ;;
    esac
    boot $((pages * 1024)) "$kernel" "$suite" | tee "$work/$1"
    case $(grep -E '^[0-9]+ passed, ' "$work/$1") in
        *" passed, 0 failed, "*) ;;
        *" passed, "*) return 1 ;;
        *) echo "FAILED   the machine did not come to the end"; return 1 ;;
    esac
}

status=0
if [[ " ${parts[*]} " =~ " user " || " ${parts[*]} " =~ k" " ]]; then
    install_built
    [[ " ${parts[*]} " == *" user "* ]] && inside=(inside user) || inside=(inside)
    echo "== $(basename "$wheel") on this machine's kernel (qemu-user)"
    scripts/arm.sh scripts/arm-check.sh "${inside[@]}" || status=1
fi
[ -d "$root" ] || make_root
for part in "${parts[@]}"; do
    case $part in
        user) continue ;;
        systems)
            echo "== $(basename "$wheel") in other Debians, on this machine's kernel (qemu-user)"
            on_systems || status=1
            continue
            ;;
        stranger) make_stranger ;;
        *) make_archive ;;
    esac
    echo "== $(basename "$wheel") on Debian 13's kernel, $part (qemu-system)"
    on_a_kernel "$part" || status=1
done
echo "arm-check: $((SECONDS / 60)) min $((SECONDS % 60)) s"
exit "$status"
