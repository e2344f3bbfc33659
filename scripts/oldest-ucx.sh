#!/usr/bin/env bash
# Builds the oldest UCX that we claim, 1.12, whose headers we use, into target/oldest-ucx, for the
# tests. It takes two minutes on two cores; nothing is done if it is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=$PWD/target/oldest-ucx
[ ! -e "$prefix/lib/libucp.so.0" ] || exit 0
# shellcheck disable=SC1091
[ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"
source=$(cargo metadata --locked --format-version 1 | python3 -c 'import json, os, sys
[one] = [one for one in json.load(sys.stdin)["packages"] if one["name"] == "ucx1-sys"]
print(os.path.dirname(one["manifest_path"]))')
unset INSTALL GNUMAKEFLAGS CONFIG_SITE # what .cargo/config.toml says is for headers alone
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
log=$build/log
{
    cp -r "$source/ucx" "$build/ucx"
    cd "$build/ucx"
    ./autogen.sh
    ./contrib/configure-release --prefix="$prefix" --without-java --without-go --disable-doxygen-doc
    make -j"$(nproc)"
    make install
} >"$log" 2>&1 || {
    tail -20 "$log" >&2
    exit 1
}
