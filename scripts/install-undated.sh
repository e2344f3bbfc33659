#!/bin/sh
# As install(1), but what it installs is dated long ago (see .cargo/config.toml).
set -eu
install "$@"
for target; do :; done
find "$target" -type f -exec touch -d 2000-01-01 {} +
