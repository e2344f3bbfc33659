#!/usr/bin/env bash
# Sets up, builds, and brings up a native cluster: on this machine's GPUs, or where there is none on
# a simulated DGX H100. Ctrl-C takes it down. Further arguments go to `cuda-cluster up`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
# shellcheck disable=SC1091
[ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"
echo "up: building; the first time takes about ten minutes on two cores"
cargo build --release --locked
flags=(--enable-nvlink --enable-infiniband --net-devices auto)
if [ ! -e /dev/nvidiactl ]; then
    flags=(--topology dgx-h100 --simulate "${flags[@]}")
fi
exec target/release/cuda-cluster up "${flags[@]}" "$@"
