#!/usr/bin/env bash
# Runs a command where Rust can build for 64-bit Arm: in Debian's sid, whose packages have Rust's
# standard library for it. The command sees this directory, cargo's registry and the network, and runs
# programs for Arm by emulation. For who has a toolchain without that target, and no rustup to add it.
#
#   scripts/arm.sh COMMAND [ARGUMENT...]    for example scripts/wheel.sh --target aarch64
#
# As root, with what scripts/setup.sh --arm installs. The first time, it makes the Debian in
# target/aarch64/debian (2 GB, some minutes). Remove that for a newer one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'arm: %s\n' "$*" >&2; exit 1; }

[ $# -gt 0 ] || fail "a command is missing; see the top of $0"
[ "$(id -u)" -eq 0 ] || fail "needs root, to make a Debian in a directory"
for tool in mmdebstrap qemu-aarch64-static; do
    command -v "$tool" >/dev/null || fail "there is no $tool: run scripts/setup.sh --arm"
done

root=$PWD/target/aarch64/debian
if [ ! -d "$root" ]; then
    echo "arm: fetching Debian's sid" >&2
    # What setup.sh says that a build needs, what wheel.sh asks for, and Rust with the other processor's
    # library, headers and tools.
    mapfile -t packages < <(sed -n '/^build=(/,/^)/s/^  *\([^#]*\).*/\1/p' scripts/setup.sh | xargs -n 1)
    packages+=(python3 python3-venv bzip2 xz-utils rustc cargo libstd-rust-dev:arm64)
    packages+=(libc6-dev-arm64-cross binutils-aarch64-linux-gnu)
    rm -rf "$root.new"
    mkdir -p "$(dirname "$root")"
    # Mirrors and snapshots may be older than sid's lists are valid. They are signed all the same.
    mmdebstrap --quiet --variant=minbase --architectures=amd64,arm64 \
        --aptopt='Acquire::Check-Valid-Until "false"' --include="$(IFS=, && echo "${packages[*]}")" \
        sid "$root.new" >"$root.log" 2>&1 || fail "there is no Debian sid; see $root.log"
    mv "$root.new" "$root"
fi

certificates=/etc/ssl/certs/ca-certificates.crt
cp /etc/resolv.conf "$root/etc/resolv.conf"
cp "${PIP_CERT:-$certificates}" "$root$certificates"
qemu=$(command -v qemu-aarch64-static)
# It may be running there: this command can run more than once at a time.
cmp --quiet "$qemu" "$root$qemu" || cp "$qemu" "$root$qemu"
cargo=${CARGO_HOME:-$HOME/.cargo}
mkdir -p "$cargo/registry"
# A worktree's commits are elsewhere.
folders=("$PWD" "$cargo/registry" "$(git rev-parse --path-format=absolute --git-common-dir)")
# What is mounted is seen by the command alone.
# shellcheck disable=SC2016
exec scripts/emulated.sh bash -euc '
    root=$1 cargo=$2 count=$3
    shift 3
    for folder in "${@:1:count}"; do
        mkdir -p "$root$folder"
        mount --rbind "$folder" "$root$folder"
    done
    shift "$count"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME="$HOME" CARGO_HOME="$cargo" \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt ${SOURCE_DATE_EPOCH+SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH"} \
        chroot "$root" bash -c "cd \"\$0\" && exec \"\$@\"" "$PWD" "$@"
' arm "$root" "$cargo" "${#folders[@]}" "${folders[@]}" "$@"
