#!/bin/sh
# A rank whose output goes through a filter; the filter of rank 3 has stopped reading.
here=$(dirname "$0")
"$1" "$here/printed_into_pipe.py" | if [ "$RANK" = 3 ]; then sleep 100000; else cat >/dev/null; fi
