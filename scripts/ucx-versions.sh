#!/usr/bin/env bash
# The oldest and the newest UCX of PyPI that know CUDA as we use it, for the tests: puts them into
# target/ucx. With --stories it then runs the stories with GPUs with each of them (ten minutes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for package in libucx-cu12==1.18.1 libucx-cu13==1.22.0; do
    folder=target/ucx/${package##*==}
    [ -e "$folder/libucx/lib/libucp.so.0" ] && continue
    rm -rf "$folder" "$folder.part"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder.part" "$package"
    mv "$folder.part" "$folder"
done
[ "${1:-}" = --stories ] || exit 0
for folder in "$PWD"/target/ucx/*[0-9]/; do
    echo "UCX $(basename "$folder")"
    CUDA_CLUSTER_TEST_UCX=$folder cargo test --locked --test cluster -- first_day gpus::
done
