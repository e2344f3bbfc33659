#!/usr/bin/env bash
# Runs a command in a network of its own, where it may make links: scripts/own-network.sh CMD...
# Others may be using the machine's: UCX of theirs may choose a link that goes again.
# What has no link goes to nobody, as on a machine with a default route. Needs root.
set -euo pipefail
# shellcheck disable=SC2016
exec unshare --net sh -euc '
    ip link set lo up
    ip link add out type veth peer name nowhere
    ip address add 192.0.2.1/24 dev out
    ip link set out up
    ip link set nowhere up
    ip neigh add 192.0.2.254 lladdr 02:00:00:00:00:01 dev out
    ip route add default via 192.0.2.254
    exec "$@"' sh "$@"
