#!/usr/bin/env bash
# UNFINISHED: stops at ucx1-sys, whose bindings do not find the C library's headers under zig.
#
# Builds what people install: a wheel for pip, a Debian package, and a tarball, all with the same
# program, its manual pages and completions. They run on any Linux with glibc 2.28 or newer: hwloc
# is inside, UCX and NVIDIA's libraries are opened at run time.
#
#   scripts/wheel.sh [--check]       --check builds the program twice, and compares
#
# Leaves target/wheels/cuda_cluster-*.whl and target/dist/. Two builds of one commit are the same,
# byte for byte. Needs what scripts/setup.sh installs; zig and maturin come from PyPI, hwloc's source
# from Debian.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC1091
[ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"

glibc=2.28
machine=$(uname -m)
target=$machine-unknown-linux-gnu
version=$(sed -n '0,/^version = "\(.*\)"/s//\1/p' Cargo.toml)
hwloc=2.9.0
hwloc_sha256=b3fb1a43a14d8fbcd8e976de5ede2ea7ce1d768ed173adb33c7ceaaf098dc970
work=$PWD/target/wheel
profile=${PROFILE:-release}
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
mkdir -p "$work"

say() { printf 'wheel: %s\n' "$*"; }

tools=$work/tools
if [ ! -x "$tools/bin/maturin" ]; then
    say "installing maturin and zig"
    python3 -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check maturin==1.16.0 ziglang==0.17.1
fi
export PATH=$tools/bin:$PATH

# hwloc, without the libraries that a bare machine lacks: it reads processors and memory from sysfs,
# and XML with a parser of its own.
prefix=$work/hwloc-$hwloc
if [ ! -f "$prefix/lib/libhwloc.a" ]; then
    say "building hwloc $hwloc"
    source=hwloc_$hwloc.orig.tar.bz2
    url=http://deb.debian.org/debian/pool/main/h/hwloc/$source
    [ -f "$work/$source" ] || curl --fail --silent --show-error --location -o "$work/$source" "$url"
    echo "$hwloc_sha256  $work/$source" | sha256sum --check --quiet
    rm -rf "$work/hwloc-build"
    mkdir "$work/hwloc-build"
    tar -C "$work/hwloc-build" --strip-components=1 -xjf "$work/$source"
    (
        cd "$work/hwloc-build"
        export CC="$tools/bin/python -m ziglang cc -target $machine-linux-gnu.$glibc"
        export AR="$tools/bin/python -m ziglang ar" RANLIB="$tools/bin/python -m ziglang ranlib"
        CFLAGS="-O2 -g0 -fPIC -fno-sanitize=undefined -ffile-prefix-map=$PWD=hwloc" ./configure --quiet \
            --prefix="$prefix" --enable-static --disable-shared --disable-libxml2 --disable-pci \
            --disable-libudev --disable-opencl --disable-cuda --disable-nvml --disable-rsmi \
            --disable-levelzero --disable-gl --disable-cairo --disable-plugins --disable-doxygen \
            --without-x >configure.log
        make --quiet -C include install >make.log
        make --quiet -j"$(nproc)" -C hwloc >>make.log 2>&1
        make --quiet -C hwloc install >>make.log
        install -D -m 644 hwloc.pc "$prefix/lib/pkgconfig/hwloc.pc"
    )
fi
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig HWLOC_STATIC=1
export RUSTFLAGS="--remap-path-prefix=$PWD=cuda-cluster --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"

# Where maturin looks for what is installed beside a package.
data=$PWD/cuda_cluster.data
trap 'rm -rf "$data"' EXIT
build() {
    maturin build --profile "$profile" --locked --quiet --zig --target "$target" \
        --compatibility "manylinux_${glibc/./_}" --auditwheel skip --out "$1"
}

# The first build makes the program, which then writes its own pages; the second packs them.
say "building the program"
rm -rf "$data"
rm -f target/wheels/*.whl
build "$work/first"
folder=$profile
[ "$profile" != dev ] || folder=debug
program=$PWD/target/$target/$folder/cuda-cluster
if [ "${1:-}" = --check ]; then
    cp "$program" "$work/program.first"
    cargo clean --quiet --profile "$profile" --target "$target" --package cuda-cluster
    build "$work/first"
    cmp "$program" "$work/program.first" && say "a second build is the same"
fi
share=$data/data/share
mkdir -p "$share"/{man/man1,bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}
"$program" man "$share/man/man1"
"$program" completions bash >"$share/bash-completion/completions/cuda-cluster"
"$program" completions zsh >"$share/zsh/site-functions/_cuda-cluster"
"$program" completions fish >"$share/fish/vendor_completions.d/cuda-cluster.fish"
say "packing"
build target/wheels

needed=$(readelf -d "$program" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort | tr '\n' ' ')
for library in $needed; do
    case $library in
        libc.so.6 | libm.so.6 | libdl.so.2 | libpthread.so.0 | librt.so.1 | libgcc_s.so.1 | libutil.so.1 | ld-linux-*.so.*) ;;
        *) say "the program needs $library, which a bare machine lacks"; exit 1 ;;
    esac
done
newest=$(readelf --dyn-syms --wide "$program" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n1)
if [ "$(printf '%s\n%s\n' "$newest" "GLIBC_$glibc" | sort -V | tail -n1)" != "GLIBC_$glibc" ]; then
    say "the program needs $newest"
    exit 1
fi
say "the program needs $needed(at most $newest)"

# The tarball and the Debian package: the program under bin, the pages under share.
dist=target/dist
stage=$work/stage
rm -rf "$stage" "$dist"
mkdir -p "$stage/usr/bin" "$dist"
install -m 755 "$program" "$stage/usr/bin/cuda-cluster"
case $profile in release) strip "$stage/usr/bin/cuda-cluster" ;; esac
cp -r "$data/data/share" "$stage/usr/share"
mkdir -p "$stage/usr/share/doc/cuda-cluster"
cp README.md CHANGELOG.md configs/from-dask-cuda.md "$stage/usr/share/doc/cuda-cluster/"
cp LICENSE "$stage/usr/share/doc/cuda-cluster/copyright"
find "$stage" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$stage/usr" \
    --transform "s,^\.,cuda-cluster-$version-$machine," -c . | xz -9 >"$dist/cuda-cluster-$version-$machine.tar.xz"
mkdir -p "$stage/DEBIAN"
cat >"$stage/DEBIAN/control" <<END
Package: cuda-cluster
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: the cuda-cluster developers <cuda-cluster@localhost>
Section: science
Priority: optional
Depends: libc6 (>= $glibc), libgcc-s1
Recommends: libucx0
Description: one worker process per GPU on one machine
 Probes a machine, plans one worker for each GPU, binds each to the CPUs, memory and NIC that are
 near it, connects them over UCX, and supervises them. Runs Dask, its own scheduler, or any program.
END
find "$stage" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group -Zxz --build "$stage" "$dist" >/dev/null
say "done:"
sha256sum target/wheels/*.whl "$dist"/*
