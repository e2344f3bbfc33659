#!/usr/bin/env bash
# Boots a virtual machine with six NUMA nodes, a PCI tree with switches, and RDMA by Soft-RoCE, runs
# the program in it, and prints a table of what was expected and what was seen. Ends with 1 if a
# check failed. The machine shows logic on a real kernel, never speed: it is emulated.
#
#   scripts/lab.sh [hardware|masks|services] [BINARY]
#                                                  default: hardware; target/release/cuda-cluster, then debug
#   scripts/lab.sh shell                           a shell in the machine, on this terminal
#
#   hardware   places, bindings, lanes, containment (scripts/lab/hardware.py)
#   masks      every thread of every worker under masks of numbers, UUIDs and MIG instances, whoever starts
#              it (scripts/lab/masks.py)
#   services   systemd, Slurm, Open MPI (scripts/lab/services.py)
#
#   LAB_PARTS=cables,kills    only these parts of a suite, by the names of their functions
#
# Needs root, debootstrap and Debian's packages. From nothing, both suites take a quarter of an hour on
# two cores. All of it stays in target/lab (5 GB); nothing is installed on this machine. The program must
# run on Debian 12. Dask and PyPI's libucx come from .venv (scripts/setup.sh --tests),
# direct:// from beside the program (cargo build --lib -p cuda-cluster -p cuda-cluster-comm).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'lab: %s\n' "$*" >&2; exit 2; }

lab=$PWD/target/lab
tools=$lab/tools
# Within QEMU's root, because that is all it sees.
images=$tools/images
limit=${LAB_LIMIT:-1200}

suites=()
binary=
for argument in "$@"; do
    case $argument in
        hardware | masks | services | shell) suites+=("$argument") ;;
        *) binary=$argument ;;
    esac
done
[ ${#suites[@]} -gt 0 ] || suites=(hardware)
if [ -z "$binary" ]; then
    binary=target/release/cuda-cluster
    [ -x "$binary" ] || binary=target/debug/cuda-cluster
fi
[ -x "$binary" ] || fail "there is no program at $binary: cargo build --release"
[ "$(id -u)" -eq 0 ] || fail "needs root, to make a Debian in a directory"
for tool in debootstrap python3 setpriv timeout; do
    command -v "$tool" >/dev/null || fail "there is no $tool: apt-get install debootstrap python3 util-linux"
done
mkdir -p "$lab"
exec 9>"$lab/lock"
flock --nonblock 9 || fail "another lab runs in $lab"

# The lab's own Debian, and two more within it for the machine.
installed() { # ROOT PACKAGES
    local root=$1
    shift
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    chroot "$root" env DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get install -qy "$@" >>"$lab/log" 2>&1 ||
        fail "cannot install $* from Debian's packages; see $lab/log"
    chroot "$root" apt-get clean
}
# made ROOT COMMAND...: runs a command that fills a root, whole or not at all.
made() {
    local root=$1
    shift
    [ ! -d "$root" ] || return 0
    echo "lab: preparing ${root#"$PWD"/}"
    rm -rf "$root.new"
    "$@" "$root.new"
    mv "$root.new" "$root"
}
base() {
    debootstrap --variant=minbase --include=ca-certificates bookworm "$1" >>"$lab/log" 2>&1 ||
        fail "there is no Debian 12; see $lab/log"
    cat >"$1/etc/apt/sources.list" <<'END'
deb http://deb.debian.org/debian bookworm main
deb http://deb.debian.org/debian bookworm-updates main
deb http://deb.debian.org/debian-security bookworm-security main
END
    echo 'APT::Install-Recommends "false";' >"$1/etc/apt/apt.conf.d/lab"
    chroot "$1" apt-get update -q >>"$lab/log" 2>&1
}
tools() {
    cp -a "$lab/base" "$1"
    : >"$1/etc/mtab"
    installed "$1" qemu-system-x86 busybox-static cpio e2fsprogs gcc-12 make xz-utils kmod \
        linux-headers-amd64 linux-source-6.1
    kernel "$1"
}
# The kernel that the headers are for, and Soft-RoCE for it, which says on which card it is.
kernel() {
    local version
    version=$(basename "$1"/lib/modules/*)
    chroot "$1" sh -ec "
        mkdir /kernel && cd /kernel
        apt-get download -q linux-image-$version
        dpkg -x linux-image-*.deb image
        tar -xJf /usr/src/linux-source-6.1.tar.xz linux-source-6.1/drivers/infiniband/sw/rxe
        cd linux-source-6.1/drivers/infiniband/sw/rxe
        # As hardware looks: its parent is a PCI device, and no attribute names a netdev.
        sed -i 's/parent_show/card_show/; s/DEVICE_ATTR_RO(parent)/DEVICE_ATTR_RO(card)/
            s/dev_attr_parent/dev_attr_card/; s/#include <linux.dma-mapping.h>/&\n#include <linux\/pci.h>/
            /strscpy(dev->node_desc/i dev->dev.parent = rxe->ndev->dev.parent; \
                while (dev->dev.parent && !dev_is_pci(dev->dev.parent)) dev->dev.parent = dev->dev.parent->parent;
            ' rxe_verbs.c
        make -C /lib/modules/$version/build M=\$PWD CONFIG_RDMA_RXE=m modules
        cp rdma_rxe.ko /kernel/image/lib/modules/$version/kernel/drivers/infiniband/sw/rxe/
        depmod --basedir /kernel/image $version
        rm -r /kernel/linux-source-6.1 /kernel/*.deb /usr/src/linux-source-6.1.tar.xz" >>"$lab/log" 2>&1 ||
        fail "cannot build Soft-RoCE; see $lab/log"
}
# What the programs of both suites need.
common=(kmod iproute2 rdma-core ibverbs-providers libucx0 numactl libhwloc15 procps python3)
hardware() {
    cp -a "$lab/base" "$1"
    installed "$1" "${common[@]}"
}
services() {
    cp -a "$lab/base" "$1"
    installed "$1" "${common[@]}" systemd-sysv dbus slurm-wlm munge openmpi-bin
    cat >"$1/etc/systemd/system/lab.service" <<'END'
[Unit]
After=multi-user.target
[Service]
ExecStart=/lab/start ready
StandardInput=file:/dev/ttyS1
StandardOutput=file:/dev/ttyS1
StandardError=file:/dev/ttyS1
[Install]
WantedBy=graphical.target multi-user.target
END
    chroot "$1" systemctl --quiet enable lab
    # The suite starts them when they are configured.
    chroot "$1" systemctl --quiet disable munge slurmctld slurmd
}

# disk NAME FOLDER SIZE: a file system with what is in a folder of the tools' root.
disk() {
    rm -f "$images/$1"
    truncate --size "$3" "$images/$1"
    chroot "$tools" mke2fs -q -t ext4 -O ^has_journal -d "$2" "/images/$1"
}
# What the machine needs to find its disk; then it is ready for the suite.
initramfs() {
    local root=$tools/initramfs version
    version=$(basename "$tools"/kernel/image/lib/modules/*)
    rm -rf "$root"
    mkdir -p "$root"/{bin,modules,proc,dev,root}
    cp "$tools/bin/busybox" "$root/bin/"
    cp scripts/lab/init "$root/init"
    chroot "$tools" modprobe --dirname /kernel/image --set-version "$version" --show-depends --all \
        virtio_pci virtio_blk ext4 | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$root/modules/order"
    while read -r module; do cp "$tools$module" "$root/modules/"; done <"$root/modules/order"
    chroot "$tools" sh -c 'cd /initramfs && find . | cpio --quiet -o -H newc | gzip -1' >"$images/initramfs"
    cp "$tools/kernel/image/boot/vmlinuz-$version" "$images/vmlinuz"
}
# The disk that changes with each run: the program, the stand-ins for GPUs, and the checks.
program() {
    local root=$tools/program
    rm -rf "$root"
    mkdir -p "$root/lib"
    cp "$binary" "$root/cuda-cluster"
    strip --strip-debug "$root/cuda-cluster" 2>/dev/null || true
    cargo build --locked --quiet --example fake_nvml --example fake_cuda
    cp target/debug/examples/libfake_nvml.so "$root/lib/libnvidia-ml.so.1"
    cp target/debug/examples/libfake_cuda.so "$root/lib/libcuda.so.1"
    cp scripts/lab/*.py scripts/lab/start "$root/"
    cp -r configs "$root/"
    # A libucp that knows CUDA and no verbs.
    local wheel
    wheel=$(echo .venv/lib/python3*/site-packages/libucx)
    if [ -d "$wheel" ]; then
        mkdir -p "$root/venv/lib/python3/site-packages"
        cp -r "$wheel" "$root/venv/lib/python3/site-packages/"
    fi
    dask "$root/dask"
    mkdir "$root/python"
    cp -r python/cuda_cluster "$root/python/"
    if [ -d "$root/dask" ] && [ -e "$(dirname "$binary")/lib_comm.so" ]; then
        cp "$(dirname "$binary")/lib_comm.so" "$root/"
        strip --strip-debug "$root/lib_comm.so" 2>/dev/null || true
    fi
    python3 scripts/lab/machine.py gpus >"$root/gpus.json"
    disk program /program 600M
}
# The Dask of .venv with all that it requires, for the machine's Python. Nothing if either isn't there.
dask() {
    [ -x .venv/bin/python ] || return 0
    .venv/bin/python - "$1" <<'END'
import importlib.metadata, pathlib, shutil, sys

here = pathlib.Path(sys.argv[1])
try:
    from packaging.requirements import Requirement
    names = ["distributed"] if importlib.metadata.version("distributed") else []
except ImportError:
    sys.exit()
if sys.version_info[:2] != (3, 11):
    print(f"lab: no Dask in the machine: its Python is 3.11, that of .venv {sys.version.split()[0]}")
    sys.exit()
# The list grows as requirements are found.
for name in names:
    found = importlib.metadata.distribution(name)
    needs = map(Requirement, found.requires or [])
    wanted = [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    names += [need for need in dict.fromkeys(wanted) if need not in names]
    for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
        source = found.locate_file(top)
        if source.is_dir():
            # Times stay, so that compiled files count.
            shutil.copytree(source, here / top, dirs_exist_ok=True)
        else:
            here.mkdir(exist_ok=True)
            shutil.copy2(source, here / top)
END
}

# What a suite's machine has installed.
root_of() {
    case $1 in
        services) echo services ;;
        *) echo hardware ;;
    esac
}

# boot SUITE: runs the machine until it powers itself off. Its first line is the console's, its
# second this script's output.
boot() {
    local suite=$1 root init=/lab/start
    # This machine may be too busy for what a kernel and systemd expect of time.
    local patience="no_timer_check nowatchdog systemd.default_timeout_start_sec=600"
    patience+=" systemd.default_device_timeout_sec=600"
    root=$(root_of "$suite")
    [ "$suite" != services ] || init=/sbin/init
    # shellcheck disable=SC2054  # the commas are QEMU's
    local arguments=(
        -nodefaults -display none -no-reboot -machine q35 -cpu max -accel tcg,thread=multi
        -kernel /images/vmlinuz -initrd /images/initramfs
        -append "console=ttyS0 panic=-1 quiet lab.suite=$suite lab.parts=${LAB_PARTS:-} lab.init=$init $patience"
        -chardev "file,id=console,path=/images/console" -serial chardev:console -serial stdio
        -drive "id=root,file=/images/$root,format=raw,if=none,snapshot=on"
        -drive "id=program,file=/images/program,format=raw,if=none,readonly=on"
        -device virtio-blk-pci,drive=root,bus=pcie.0 -device virtio-blk-pci,drive=program,bus=pcie.0
    )
    mapfile -t -O ${#arguments[@]} arguments < <(python3 scripts/lab/machine.py qemu)
    # Whatever ends this script ends the machine.
    setpriv --pdeathsig TERM timeout --foreground --kill-after 5 "$limit" \
        setpriv --pdeathsig KILL nice -n 5 chroot "$tools" qemu-system-x86_64 "${arguments[@]}" <&0 9>&- &
    wait $! || true
}

made "$lab/base" base
made "$tools" tools
mkdir -p "$images"
status=0
for suite in "${suites[@]}"; do
    root=$(root_of "$suite")
    if [ ! -e "$images/$root" ]; then
        made "$tools/$root" "$root"
        cp -a "$tools/kernel/image/lib/modules" "$tools/$root/lib/"
        mkdir -p "$tools/$root/lab"
        disk "$root" "/$root" 3G
    fi
    initramfs
    program
    if [ "$suite" = shell ]; then boot shell; exit; fi
    echo "== $suite: $binary, $(date --utc +%FT%TZ)"
    boot "$suite" </dev/null | tee "$lab/$suite"
    case $(grep -E '^[0-9]+ passed, ' "$lab/$suite") in
        *" passed, 0 failed, "*) ;;
        *" passed, "*) status=1 ;;
        *) echo "FAILED  the machine did not come to the end; its console: $images/console"; status=1 ;;
    esac
done
echo "lab: $((SECONDS / 60)) min $((SECONDS % 60)) s"
exit "$status"
