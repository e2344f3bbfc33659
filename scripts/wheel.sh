#!/usr/bin/env bash
# Builds what people install: a wheel for pip, a Debian package and a tarball. Each has the same
# program, its manual pages and its completions, and runs on any Linux with glibc 2.28 or newer:
# hwloc is linked in, UCX and NVIDIA's libraries are opened at run time.
#
#   scripts/wheel.sh            target/wheels/cuda_cluster-*.whl, target/dist/*.deb, *.tar.xz
#   scripts/wheel.sh --check    also builds the last commit a second time, elsewhere, and compares
#   scripts/wheel.sh --debug    target/wheels/debug/cuda_cluster-*.whl alone: the debug build, for
#                               this machine alone; what the tests install
#   scripts/wheel.sh --target aarch64 [--check]
#                               on x86-64 for 64-bit Arm: target/aarch64/wheels, target/aarch64/dist;
#                               as root, with what scripts/setup.sh --arm installs, or with a Rust that
#                               has the target
#
# Two builds of a commit with the same Rust are the same, byte for byte. Takes a quarter of an hour on
# two cores. Needs what scripts/setup.sh installs; maturin and zig come from PyPI, hwloc from Debian.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC1091
[ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"

maturin=1.16.0
zig=0.17.1
hwloc=2.9.0
hwloc_sha256=b3fb1a43a14d8fbcd8e976de5ede2ea7ce1d768ed173adb33c7ceaaf098dc970
glibc=2.28

say() { printf 'wheel: %s\n' "$*"; }
fail() { printf 'wheel: %s\n' "$*" >&2; exit 1; }

host=$(uname -m)
machine=$host mode='' given=("$@")
while [ $# -gt 0 ]; do
    case $1 in
    --check | --debug) mode=$1 ;;
    --target) machine=${2:-} && shift $(($# > 1)) ;;
    *) fail "unknown argument $1; see the top of $0" ;;
    esac
    shift
done
target=$machine-unknown-linux-gnu
case $host-$machine$mode in
"$host-$host$mode") ;;
x86_64-aarch64--debug) fail "the debug build is for this machine alone" ;;
x86_64-aarch64*)
    if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; then
        say "this Rust has no library for $target"
        exec scripts/arm.sh scripts/wheel.sh "${given[@]}"
    fi
    ;;
*) fail "no way to build for '$machine' here; on x86_64 there is --target aarch64" ;;
esac
for tool in cargo python3 cc pkg-config; do
    command -v "$tool" >/dev/null || fail "there is no $tool: run scripts/setup.sh"
done
if [ "$mode" != --debug ]; then
    for tool in curl:curl bzip2:bzip2 xz:xz-utils dpkg-deb:dpkg readelf:binutils autoreconf:autoconf git:git; do
        command -v "${tool%:*}" >/dev/null || fail "there is no ${tool%:*}: apt-get install ${tool#*:}"
    done
fi
if [ "$machine" != "$host" ]; then
    for tool in "qemu-$machine-static" "$machine-linux-gnu-strip"; do
        command -v "$tool" >/dev/null || fail "there is no $tool: run scripts/setup.sh --arm"
    done
fi

version=$(sed -n '0,/^version = "\(.*\)"/s//\1/p' Cargo.toml)
out=target work=$PWD/target/wheel
if [ "$machine" != "$host" ]; then
    out=target/$machine work=$PWD/target/$machine/wheel
    # Apart from the builds for this machine, which another Rust makes.
    export CARGO_TARGET_DIR=$PWD/target/$machine/cargo
fi
share=$work/data/data/share
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
# Optimised across crates, which a build from source does without.
export CARGO_PROFILE_RELEASE_LTO=thin
umask 022
mkdir -p "$work"

exec 9>"$work/lock"
flock --nonblock 9 || { say "waiting for another build"; flock 9; }

tools=$work/tools-$maturin
wanted=("maturin==$maturin")
if [ "$mode" != --debug ]; then
    tools+=-$zig
    wanted+=("ziglang==$zig")
fi
# They are those of one Python, and scripts/arm.sh has another.
if [ ! -f "$tools/installed" ] || ! "$tools/bin/python" -c '' 2>/dev/null; then
    say "installing ${wanted[*]}"
    rm -rf "$tools"
    python3 -m venv "$tools" || fail "python3 makes no environments: apt-get install python3-venv"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
    touch "$tools/installed"
fi
export PATH=$tools/bin:$PATH

# Reads processors and memory from sysfs, and XML with a parser of its own: without libudev, libpci
# and libxml2, which a bare machine lacks.
prefix=$work/hwloc-$hwloc
build_hwloc() {
    say "building hwloc $hwloc"
    local archive=hwloc_$hwloc.orig.tar.bz2 source=$work/hwloc-source
    [ -f "$work/$archive" ] || curl --fail --silent --show-error --location --output "$work/$archive" \
        "http://deb.debian.org/debian/pool/main/h/hwloc/$archive" || fail "cannot fetch hwloc's source"
    echo "$hwloc_sha256  $work/$archive" | sha256sum --check --quiet || fail "$archive is not what it should be"
    rm -rf "$source" "$prefix"
    mkdir "$source"
    tar -C "$source" --strip-components=1 -xjf "$work/$archive"
    (
        cd "$source"
        CC=$zigcc CFLAGS="-O2 -g0 -fPIC -ffile-prefix-map=$PWD=hwloc" ./configure --quiet "${cross[@]}" \
            --prefix="$prefix" --localstatedir=/var --enable-static --disable-shared --disable-libxml2 --disable-pci \
            --disable-libudev --disable-opencl --disable-cuda --disable-nvml --disable-rsmi \
            --disable-levelzero --disable-gl --disable-cairo --disable-plugins --disable-doxygen \
            --without-x
        make --quiet -C include install
        make --quiet -j"$(nproc)" -C hwloc
        make --quiet -C hwloc install
        install -D -m 644 hwloc.pc "$prefix/lib/pkgconfig/hwloc.pc"
        install -D -m 644 COPYING "$prefix/COPYING.hwloc"
    ) >"$work/hwloc.log" 2>&1 || fail "hwloc does not build; see $work/hwloc.log"
    rm -rf "$source"
}

if [ "$mode" = --debug ]; then
    wheels=$out/wheels/debug
    arguments=(--profile dev --strip false --compatibility linux --auditwheel skip)
else
    wheels=$out/wheels
    arguments=(--target "$target" --compatibility "manylinux_${glibc/./_}" --auditwheel check)
    # The C compiler and linker for the old glibc. Only what is linked in is compiled by it: ucx1-sys asks
    # UCX's headers for types and numbers, with the host's compiler, whose headers its clang knows. UCX is
    # opened at run time; the empty archives that scripts/ucx-install.sh leaves instead of it, zig does
    # not take where it is asked for shared libraries.
    zigcc=$work/zigcc
    cat >"$zigcc" <<END
#!/bin/sh
for word do
    shift
    case \$word in -luc[mstp]) ;; *) set -- "\$@" "\$word" ;; esac
done
export CARGO_ZIGBUILD_ZIG_VERSION=$zig CARGO_ZIGBUILD_ZIG_COMMAND=$tools/bin/python
export CARGO_ZIGBUILD_ZIG_COMMAND_ARGS='-m ziglang'
export ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig
exec $tools/bin/maturin zig cc -- -g -fno-sanitize=all -target $machine-linux-gnu.$glibc "\$@"
END
    chmod +x "$zigcc"
    variable=${target//-/_}
    declare -x "CARGO_TARGET_${variable^^}_LINKER=$zigcc" "CC_$variable=$zigcc"
    cross=() architecture=$(dpkg --print-architecture)
    if [ "$machine" != "$host" ]; then
        cross=(--host="$machine-linux-gnu") architecture=arm64
        # The headers of libc6-dev-arm64-cross are for bindings; its libraries for the program, which
        # writes its pages.
        declare -x "BINDGEN_EXTRA_CLANG_ARGS_$variable=-isystem $(clang -print-resource-dir)/include \
-isystem /usr/$machine-linux-gnu/include"
        declare -x "CARGO_TARGET_${variable^^}_RUNNER=qemu-$machine-static -L /usr/$machine-linux-gnu"
        export PKG_CONFIG_ALLOW_CROSS=1
    fi
    [ -f "$prefix/COPYING.hwloc" ] || build_hwloc
    export PKG_CONFIG_PATH=$prefix/lib/pkgconfig HWLOC_STATIC=1
    sysroot=$(rustc --print sysroot)
    commit=$(rustc --version --verbose | sed -n 's/^commit-hash: //p')
    export RUSTFLAGS="--remap-path-prefix=$PWD=/cuda-cluster --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo \
--remap-path-prefix=$sysroot/lib/rustlib/src/rust=/rustc/$commit"
    # What is linked in and is not a crate.
    cat >"$work/linked.json" <<END
[
  {
    "type": "library",
    "name": "hwloc",
    "version": "$hwloc",
    "licenses": [{ "license": { "id": "BSD-3-Clause" } }],
    "purl": "pkg:deb/debian/hwloc@$hwloc?arch=source",
    "hashes": [{ "alg": "SHA-256", "content": "$hwloc_sha256" }]
  },
  {
    "type": "library",
    "name": "LLVM libunwind and compiler-rt",
    "version": "as in zig $zig",
    "licenses": [{ "expression": "Apache-2.0 WITH LLVM-exception" }],
    "purl": "pkg:pypi/ziglang@$zig"
  }
]
END
fi

say "building the wheel"
rm -rf "$work/data" "$wheels"/*.whl
if [ "$mode" != --debug ]; then
    install -D -m 644 "$prefix/COPYING.hwloc" "$share/doc/cuda-cluster/COPYING.hwloc"
fi
wheel=$("$tools/bin/python" scripts/wheel_backend.py "$wheels" "$share" "${arguments[@]}")
if [ "$mode" = --debug ]; then
    exit
fi
cargo tree --locked --package cuda-cluster-comm --target "$target" --edges normal --prefix none \
    --format '{p}|{l}' >"$work/module.txt"
python3 scripts/wheel_sbom.py "$wheel" "$work/linked.json" "$work/module.txt" >"$work/sbom.json"

# Nothing that a bare machine may lack, nothing newer than its glibc, no path of this machine.
audit() {
    local needed library newest folder
    needed=$(readelf --dynamic --wide "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort | tr '\n' ' ')
    for library in $needed; do
        case $library in
            libc.so.6 | libm.so.6 | libdl.so.2 | libpthread.so.0 | librt.so.1 | libutil.so.1 | ld-linux-*.so.*) ;;
            *) fail "$1 needs $library" ;;
        esac
    done
    newest=$(readelf --dyn-syms --wide "$1" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n1)
    [ "$(printf '%s\n' "$newest" "GLIBC_$glibc" | sort -V | tail -n1)" = "GLIBC_$glibc" ] || fail "$1 needs $newest"
    for folder in "$PWD" "$HOME"; do
        # Not the end of `/proc/PID/root/dev/shm`, which is no path of root's home.
        ! LC_ALL=C grep --only-matching --text --perl-regexp "\\Q$folder\\E/(?!dev/shm)" "$1" >/dev/null ||
            fail "$1 names $folder, where it was built"
    done
    say "$(basename "$1") needs $needed(at most $newest)"
}
rm -rf "$work/packed"
python3 -m zipfile --extract "$wheel" "$work/packed"
program=$(echo "$work"/packed/cuda_cluster-*.data/scripts/cuda-cluster)
audit "$program"
for module in "$work"/packed/cuda_cluster/_comm.*.so; do
    audit "$module"
done

# The tarball: the program under bin, the rest under share. The Debian package has the same, where
# Debian looks for it, packed by dpkg-deb: cargo-deb would want this list of files once more.
dist=$out/dist
name=cuda-cluster-$version-$machine
stage=$work/stage
rm -rf "$stage" "$dist"
mkdir -p "$stage" "$dist"
documents=$stage/usr/share/doc/cuda-cluster
install -D -m 755 "$program" "$stage/usr/bin/cuda-cluster"
cp -r "$share" "$stage/usr/share"
mkdir -p "$documents/examples"
cp README.md CHANGELOG.md LICENSE "$documents/"
cp -r configs/* "$documents/examples/"
cp "$work/sbom.json" "$documents/cuda-cluster.cyclonedx.json"
chmod -R u=rwX,go=rX "$stage"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$stage/usr" \
    --transform "s,^\.,$name," -c . | xz -9 >"$dist/$name.tar.xz"

maintainer="the cuda-cluster developers <cuda-cluster@localhost.localdomain>"
gzip -9n "$stage"/usr/share/man/man1/* "$documents/CHANGELOG.md"
mv "$documents/CHANGELOG.md.gz" "$documents/changelog.gz"
mv "$stage/usr/share/zsh/site-functions" "$stage/usr/share/zsh/vendor-completions"
cat >"$documents/changelog.Debian" <<END
cuda-cluster ($version-1) unstable; urgency=medium

  * See changelog.gz.

 -- $maintainer  $(date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")
END
gzip -9n "$documents/changelog.Debian"
{
    printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n'
    printf 'Upstream-Name: cuda-cluster\n\nFiles: *\nCopyright: the cuda-cluster developers\nLicense: Apache-2.0\n'
    printf ' On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.\n'
    printf '\nFiles: usr/bin/cuda-cluster\nCopyright: the authors of what cuda-cluster.cyclonedx.json lists\n'
    printf 'License: several\n cuda-cluster.cyclonedx.json has the license of each part. hwloc:\n .\n'
    sed -e 's/^$/./' -e 's/^/ /' "$documents/COPYING.hwloc"
} >"$documents/copyright"
rm "$documents/LICENSE" "$documents/COPYING.hwloc"
mkdir -p "$stage/DEBIAN"
cat >"$stage/DEBIAN/control" <<END
Package: cuda-cluster
Version: $version-1
Architecture: $architecture
Maintainer: $maintainer
Section: science
Priority: optional
Installed-Size: $(find "$stage/usr" -type f -printf '%s\n' | awk '{ n += int(($1 + 1023) / 1024) } END { print n }')
Depends: libc6 (>= $glibc)
Recommends: libucx0 (>= 1.12)
Description: one worker process per GPU on one machine
 Probes a machine, plans one worker for each GPU, binds each to the CPUs,
 memory and NIC that are near it, connects them over UCX, and supervises
 them. Runs Dask, its own scheduler, or any program.
END
(cd "$stage" && find usr -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
chmod -R u=rwX,go=rX "$stage"
find "$stage" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group -Zxz --build "$stage" "$dist" >/dev/null
rm -rf "$stage"
made() { (cd "$1" && sha256sum "$wheels"/*.whl "$dist"/*); }

if [ "$mode" = --check ]; then
    [ -z "$(git status --porcelain --untracked-files=no)" ] || fail "--check compares commits: commit first"
    say "building the commit again, elsewhere"
    second=$(mktemp -d)
    trap 'rm -rf cuda_cluster.data "$second"' EXIT
    git clone --quiet . "$second/again"
    env -u RUSTFLAGS -u PKG_CONFIG_PATH -u HWLOC_STATIC -u CARGO_TARGET_DIR \
        "$second/again/scripts/wheel.sh" --target "$machine" >/dev/null
    diff <(made .) <(made "$second/again") || fail "a second build is different"
    say "a second build is the same"
fi
say "done:"
made .
