#!/bin/sh
# A rank that is a script: steps in Python, and pauses.
while :; do
    "$1" "$(dirname "$0")/shell_steps.py"
    sleep 9
done
