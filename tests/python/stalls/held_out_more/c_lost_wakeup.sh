#!/bin/sh
# Builds c_lost_wakeup.c for this rank and becomes it.
here=$(dirname "$0")
cc -g -O0 -pthread -o "$TMPDIR/c_lost_wakeup-$RANK" "$here/c_lost_wakeup.c" && exec "$TMPDIR/c_lost_wakeup-$RANK"
