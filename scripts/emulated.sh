#!/usr/bin/env bash
# Runs a command here for which programs for 64-bit Arm are emulated (qemu-user): for example one in the
# Debian of a directory. It has mounts and processes of its own, and root's power over them with the
# first 65,536 users and groups; what it leaves running ends with it.
#
#   scripts/emulated.sh COMMAND [ARGUMENT...]     as root, with what scripts/setup.sh --arm installs
set -euo pipefail
fail() { printf 'emulated: %s\n' "$*" >&2; exit 1; }

[ $# -gt 0 ] || fail "a command is missing; see the top of $0"
[ "$(id -u)" -eq 0 ] || fail "needs root"
qemu=$(command -v qemu-aarch64-static) || fail "there is no qemu-aarch64-static: run scripts/setup.sh --arm"

# Since Linux 6.7 a user namespace has program formats of its own, which nobody else sees. The first
# 20 bytes of an ELF program for Arm, and which of their bits count. F: found before a chroot; C: what
# changes the user does; P: a program sees the name that it was called by.
# shellcheck disable=SC2016
unshare --user --mount --pid --fork --kill-child bash -euc '
    until grep -q . /proc/self/uid_map && grep -q . /proc/self/gid_map; do sleep 0.1; done
    mount -t proc proc /proc
    if mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc 2>/dev/null; then
        magic="\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00"
        mask="\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff"
        printf "%s" ":aarch64:M::$magic:$mask:$1:FPC" >/proc/sys/fs/binfmt_misc/register
    fi
    exec "${@:2}"' emulated "$qemu" "$@" <&0 &
pid=$!
# unshare itself minds no other signal; with it ends what it started.
trap 'kill -KILL "$pid"' INT TERM
until [ "$(readlink "/proc/$pid/ns/user")" != "$(readlink /proc/self/ns/user)" ]; do
    [ -d "/proc/$pid" ] || fail "this kernel or this root makes no user namespaces"
    sleep 0.1
done
# Root may map others than itself; unshare alone asks newuidmap, which minds /etc/subuid.
for which in uid gid; do
    echo "0 0 65536" >"/proc/$pid/${which}_map"
done
wait "$pid"
