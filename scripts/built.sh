#!/usr/bin/env bash
# Builds a test or a bench, and prints the path of its program. Cargo itself would start it with the
# libucp that ucx1-sys built.
#
#   scripts/built.sh test|bench NAME
set -euo pipefail
cargo "$1" --quiet --locked --no-run "--$1" "$2" --message-format=json-render-diagnostics |
    python3 -c "import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get('executable') and message['target']['name'] == '$2': print(message['executable'])"
