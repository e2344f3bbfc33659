#!/usr/bin/env bash
# Makes a Debian or an Ubuntu with little in it in a directory, unless it is there; for scripts that try
# what strangers do. As root, with mmdebstrap.
#
#   scripts/system.sh RELEASE DIRECTORY [PACKAGE,PACKAGE …]      for example bookworm or noble
#   ARCHITECTURE=arm64    a Debian for that. It is only unpacked, as none of its programs runs here: dpkg
#                         knows its packages as installed, but of what they do when they are, little has been done
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
# unpacked ROOT: writes down for dpkg what has been unpacked there.
# shellcheck disable=SC2016  # dpkg's variables
unpacked() {
    local deb name
    for deb in "$1"/var/cache/apt/archives/*.deb; do
        name=$(dpkg-deb --show --showformat='${Package} ${Multi-Arch}:${Architecture}' "$deb")
        case $name in *" same:"*) name=${name/ same/} ;; *) name=${name% *} ;; esac
        { dpkg-deb --field "$deb" && printf 'Status: install ok installed\n\n'; } >>"$1/var/lib/dpkg/status"
        dpkg-deb --fsys-tarfile "$deb" | tar -t | sed -e 's,^\./,,' -e 's,/$,,' -e 's,^,/,' -e 's,^/$,/.,' >"$1/var/lib/dpkg/info/$name.list"
    done
    echo 1 >"$1/var/lib/dpkg/info/format"
    rm "$1"/var/cache/apt/archives/*.deb
    for name in passwd group; do
        cp "$1/usr/share/base-passwd/$name.master" "$1/etc/$name"
    done
    # As ca-certificates does when it is installed; pip doesn't start without the file.
    if [ -d "$1/usr/share/ca-certificates" ]; then
        cat "$1"/usr/share/ca-certificates/*/*.crt >"$1/etc/ssl/certs/ca-certificates.crt"
    fi
}

echo "fetching $release"
rm -rf "$root.new"
if [ -n "${ARCHITECTURE:-}" ]; then
    variant=extract
    options+=("--architectures=$ARCHITECTURE" --include='?essential' --include=apt --skip=cleanup/apt)
else
    variant=apt
fi
mmdebstrap --variant="$variant" ${packages:+--include="$packages"} "${options[@]}" "$release" "$root.new" "$mirror" \
    >"$root.log" 2>&1 || fail "there is no $release; see $root.log"
[ "$variant" = apt ] || unpacked "$root.new"
rm -rf "$root.keys" "$root.keys.deb"
mv "$root.new" "$root"
