#!/usr/bin/env bash
# Runs a command with a /tmp in memory, in a mount namespace of its own (`unshare --mount`), where there is nothing
# but the folder of /tmp that this project lies in, if it does.
#
#   unshare --mount --propagation private scripts/own-tmp.sh COMMAND ...
set -euo pipefail
here=$(pwd -P)
case $here in
/tmp/*)
    rest=${here#/tmp/} aside=$(mktemp -d /run/cct.XXXXXX)
    folder=/tmp/${rest%%/*}
    mount --bind "$folder" "$aside"
    mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /tmp
    mkdir "$folder"
    mount --move "$aside" "$folder"
    rmdir "$aside"
    ;;
*) mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /tmp ;;
esac
cd "$here"
exec "$@"
