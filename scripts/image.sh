#!/usr/bin/env bash
# Builds the runtime image of packaging/Containerfile with podman, and runs it as container runtimes do
# by default: another user than root, without rights, behind the seccomp filter, with 64 MiB of shared
# memory, and here without a network.
#
#   scripts/image.sh               localhost/cuda-cluster:VERSION, from Debian's image and target/wheels
#   scripts/image.sh --mmdebstrap  the same from Debian's packages, where no registry of images is reached
#   scripts/image.sh --check       tries the image; ends with 1 if something does not hold
#
# As root, with podman (and mmdebstrap), after scripts/wheel.sh. The images lie in target/image.
# PODMAN_RUN and PODMAN have more arguments, such as PODMAN="--runtime runc --cgroup-manager cgroupfs"
# where podman's default runtime does not know the machine's control groups.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
say() { printf 'image: %s\n' "$*"; }
fail() { printf 'image: %s\n' "$*" >&2; exit 1; }

work=$PWD/target/image
version=$(sed -n '0,/^version = "\(.*\)"/s//\1/p' Cargo.toml)
image=localhost/cuda-cluster:$version
read -ra given <<<"${PODMAN:-}"
read -ra given_run <<<"${PODMAN_RUN:-}"
podman() { command podman --root "$work/storage" --runroot "$work/run" --storage-driver vfs "${given[@]}" "$@"; }

[ "$(id -u)" -eq 0 ] || fail "needs root; podman keeps a user's images in another way"
command -v podman >/dev/null || fail "there is no podman: apt-get install podman"
mkdir -p "$work"

# base RELEASE: an image of Debian's essential packages and apt.
base() {
    command -v mmdebstrap >/dev/null || fail "there is no mmdebstrap: apt-get install mmdebstrap"
    [ -f "$work/$1.tar" ] || { mmdebstrap --quiet --variant=minbase "$1" "$work/$1.tar.new" >"$work/$1.log" 2>&1 &&
        mv "$work/$1.tar.new" "$work/$1.tar"; } || fail "there is no Debian $1; see $work/$1.log"
    podman image exists "localhost/debian:$1" || podman import --quiet "$work/$1.tar" "localhost/debian:$1"
}

build() {
    local arguments=()
    if [ "${1:-}" = --mmdebstrap ]; then
        base bookworm
        arguments=(--build-arg BASE=localhost/debian:bookworm)
    fi
    # Certificates of this machine's own, for pip.
    if [ -n "${PIP_CERT:-}" ]; then
        printf '[global]\ncert = /run/certificates\n' >"$work/pip.conf"
        arguments+=(--volume "$work/pip.conf:/etc/pip.conf:ro" --volume "$PIP_CERT:/run/certificates:ro")
    fi
    ls target/wheels/cuda_cluster-*.whl >/dev/null 2>&1 || fail "there is no wheel: scripts/wheel.sh"
    podman build --isolation chroot --network host --timestamp "$(git log -1 --format=%ct)" "${arguments[@]}" \
        --file packaging/Containerfile --tag "$image" target/wheels >"$work/build.log" 2>&1 ||
        fail "the image does not build; see $work/build.log"
    say "$image, $(podman image inspect --format '{{.Size}}' "$image" | numfmt --to=iec) of files"
}

# run ARGUMENTS: in a new container.
run() {
    podman run --rm --interactive --network none --shm-size 64m --read-only --tmpfs /tmp --cap-drop all \
        --security-opt no-new-privileges "${given_run[@]}" "$@"
}

# shellcheck disable=SC2016
checks='
passed=0 failed=0
check() {
    local sentence=$1 status=0
    shift
    timeout 300 "$@" >/tmp/output 2>&1 </dev/null || status=$?
    if [ "$status" = 0 ]; then passed=$((passed + 1)); echo "ok      $sentence"; return; fi
    failed=$((failed + 1)); echo "FAILED  $sentence ($status)"; tail -n 20 /tmp/output | sed "s/^/        /"
}
says() { grep --quiet --extended-regexp "$1" /tmp/output || { failed=$((failed + 1)); echo "FAILED  it says: $1"; cat /tmp/output; }; }
joins() {
    dask scheduler --host 127.0.0.1 --port 8786 >/tmp/scheduler 2>&1 &
    export DASK_SCHEDULER_ADDRESS=tcp://127.0.0.1:8786 DASK_WORKER_NAME=gpus-default-worker-1
    cuda-cluster up --engine=dask --name=worker --join="$DASK_SCHEDULER_ADDRESS" --worker-name="$DASK_WORKER_NAME" \
        --topology dgx-1-v100 --simulate --detach || return
    python3 -c "
import distributed
with distributed.Client(\"$DASK_SCHEDULER_ADDRESS\") as client:
    names = sorted(str(worker[\"name\"]) for worker in client.scheduler_info(n_workers=-1)[\"workers\"].values())
    print(names)
    assert names == [f\"$DASK_WORKER_NAME-{n}\" for n in range(8)]
    assert sum(client.gather(client.map(lambda n: n, range(100)))) == 4950
" && cuda-cluster down worker && kill %1
}
check "this is a user without rights, behind a filter, with 64 MiB of shared memory" bash -c "
    [ \$(id -u) = 1000 ] && grep -q \"^CapEff:.0*\$\" /proc/self/status && grep -q \"^Seccomp:.2\" /proc/self/status &&
    [ \$(df --output=size -k /dev/shm | tail -n 1) -le 65536 ]"
check "it looks at the machine" cuda-cluster topo
check "it looks for faults, and finds no error" cuda-cluster doctor
check "the native engine comes up on a simulated machine, every pair checked" \
    cuda-cluster up --topology dgx-1-v100 --simulate --verify --name native --detach
check "it is READY" bash -c "cuda-cluster ps native | tee /dev/stderr | grep -i ready"
check "tasks run" cuda-cluster bench tasks native
check "it is taken down" cuda-cluster down native
check "the Dask engine comes up on a simulated machine" \
    cuda-cluster up --engine dask --topology dgx-1-v100 --simulate --name dask --detach
check "Dask computes" bash -c "
    eval \"\$(cuda-cluster env dask)\"
    python3 -c \"import distributed; print(distributed.Client().submit(sum, [1, 2]).result())\" | grep 3"
check "it is taken down, too" cuda-cluster down dask
check "a program runs for every GPU" bash -c "
    cuda-cluster run --topology dgx-h100 --simulate -- sh -c \"echo rank \\\$RANK\" | sort | tail -n 1 | grep \"rank 7\""
export -f joins
check "its workers join a scheduler as those of configs/kubernetes/dask-operator.yaml" bash -c joins
check "no shared memory is left" bash -c "! ls -A /dev/shm | grep ."
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
'

check() {
    podman image exists "$image" || fail "there is no image: scripts/image.sh"
    run "$image" --version
    run --entrypoint bash "$image" -c "$checks"
}

case ${1:-} in
'' | --mmdebstrap) build "$@" ;;
--check) check ;;
*) fail "unknown argument $1; see the top of $0" ;;
esac
