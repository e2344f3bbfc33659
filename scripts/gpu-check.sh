#!/usr/bin/env bash
# The first day of a GPU machine, in about ten minutes, for one GPU or for eight: asks the driver and
# runs clusters on it, says of each check what it proves, lists what was not checked and why, and
# writes a file to send (without names and identities).
#
#   scripts/gpu-check.sh [BINARY]      default: target/release/cuda-cluster, then target/debug
#   UCX=PATH                           the libucp (default: auto)
#   REPORT=FILE                        the file (default: gpu-check.json)
#   ONLY=CHECKS                        these checks alone, by name, with commas between them
#
# On a made-up machine (tests/fake-machine, with its nvidia-smi on PATH) all but speeds are checked.
#
# Ends with 0 if every check passed, 1 if one failed, 2 if the binary or Python is missing, 77 if there
# is no GPU.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) || exit 2
binary=${1:-$here/../target/release/cuda-cluster}
[[ $# -eq 0 && ! -x $binary ]] && binary=$here/../target/debug/cuda-cluster
[[ -x $binary ]] || { echo "there is no binary at $binary: cargo build --release" >&2; exit 2; }
command -v python3 >/dev/null || { echo "python3 is missing" >&2; exit 2; }
if ! command -v nvidia-smi >/dev/null || ! gpus=$(nvidia-smi -L 2>&1) || [[ -z $gpus ]]; then
    echo "no GPU here (nvidia-smi: $( (nvidia-smi -L 2>&1 || true) | head -1)): nothing was checked"
    exit 77
fi
while read -r gpu; do echo "          $gpu"; done <<<"$gpus"
exec python3 "$here/gpu_check.py" --ucx "${UCX:-auto}" --report "${REPORT:-gpu-check.json}" \
    --only "${ONLY:-}" "$binary"
