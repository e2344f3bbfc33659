#!/usr/bin/env bash
# Fetches axe-core, which looks for what keeps people from using the page, into target/tools/axe-core: a test
# runs it in a browser (tests/cluster/access.rs). It is under the MPL 2.0 and no part of what is built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=4.14.1
sum=1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b734f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5

place=target/tools/axe-core
[ "$(cat "$place/installed.txt" 2>/dev/null)" != "$version" ] || exit 0
echo "axe-core: fetching $version into $place"
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
if command -v npm >/dev/null; then
    (cd "$new" && npm pack --silent "axe-core@$version" >/dev/null)
else
    curl --fail --silent --show-error --location --output "$new/axe-core-$version.tgz" \
        "https://registry.npmjs.org/axe-core/-/axe-core-$version.tgz"
fi
if ! echo "$sum  $new/axe-core-$version.tgz" | sha512sum --check --status; then
    echo "axe-core: what was fetched is not the published axe-core $version" >&2
    exit 1
fi
mkdir -p "$place"
tar --extract --gzip --file "$new/axe-core-$version.tgz" --directory "$place" package/axe.min.js package/LICENSE
echo "$version" >"$place/installed.txt"
