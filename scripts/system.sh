#!/usr/bin/env bash
# Makes a Debian or an Ubuntu with little in it in a directory, unless it is there; for scripts that try
# what strangers do. As root, with mmdebstrap.
#
#   scripts/system.sh RELEASE DIRECTORY [PACKAGE,PACKAGE …]      for example bookworm or noble
set -euo pipefail
fail() { printf 'system: %s\n' "$*" >&2; exit 1; }
[ $# -ge 2 ] || fail "needs a release and a directory; see the top of $0"
release=$1 root=$2 packages=${3:-}

[ -d "$root" ] && exit
[ "$(id -u)" -eq 0 ] || fail "needs root"
command -v mmdebstrap >/dev/null || fail "there is no mmdebstrap: apt-get install mmdebstrap"
mkdir -p "$(dirname "$root")"

# Debian has no keyring of Ubuntu's, so it comes from Ubuntu, in the version that is known here.
package=ubuntu-keyring_2023.11.28.1_all.deb
sha256=36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8
options=(--components=main)
case $release in
jammy | noble | resolute)
    mirror=http://archive.ubuntu.com/ubuntu
    curl --fail --silent --show-error --location --output "$root.keys.deb" \
        "$mirror/pool/main/u/ubuntu-keyring/$package" || fail "cannot fetch Ubuntu's keys"
    echo "$sha256  $root.keys.deb" | sha256sum --check --quiet || fail "$package is not what it should be"
    dpkg-deb --extract "$root.keys.deb" "$root.keys"
    options=("--components=main,universe" --keyring="$root.keys/usr/share/keyrings/ubuntu-archive-keyring.gpg")
    ;;
sid)
    mirror=http://deb.debian.org/debian
    # It changes several times a day, and mirrors of it may be late.
    options+=('--aptopt=Acquire::Check-Valid-Until "false"')
    ;;
*) mirror=http://deb.debian.org/debian ;;
esac
echo "fetching $release"
rm -rf "$root.new"
mmdebstrap --variant=apt ${packages:+--include="$packages"} "${options[@]}" "$release" "$root.new" "$mirror" \
    >"$root.log" 2>&1 || fail "there is no $release; see $root.log"
rm -rf "$root.keys" "$root.keys.deb"
mv "$root.new" "$root"
