#!/bin/sh
# A rank that is a script: it waits for programs in the background, which compute or sleep.
while :; do
    "$1" "$(dirname "$0")/shell_waits.py" 8 &
    sleep 11 &
    wait
done
