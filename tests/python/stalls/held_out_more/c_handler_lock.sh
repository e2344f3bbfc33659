#!/bin/sh
# Builds c_handler_lock.c for this rank and becomes it.
here=$(dirname "$0")
cc -g -O0 -pthread -o "$TMPDIR/c_handler_lock-$RANK" "$here/c_handler_lock.c" && exec "$TMPDIR/c_handler_lock-$RANK"
