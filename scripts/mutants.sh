#!/usr/bin/env bash
# Mutation testing of what decides. cargo-mutants changes one thing in plan, spec, topology, or the
# core of the supervisor or of the task scheduler; the tests that start no process must notice.
#
#   scripts/mutants.sh [SEED [HOW_MANY]]    a sample, by default 300; another seed, another sample
#   scripts/mutants.sh all                  all of them
#
# JOBS=N for several at once. Takes hours on two cores. Ends with 0 only if no mutant lives; those that
# live are listed at the end.
# To install cargo-mutants: scripts/setup.sh --mutants
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PWD/target/tools/bin:$PATH
seed=${1:-0} wanted=${2:-300}
command -v cargo-mutants >/dev/null || {
    echo "cargo-mutants is missing: scripts/setup.sh --mutants" >&2
    exit 2
}

export INSTA_UPDATE=no
# Of its own, so that nothing is built twice; without symbols, which take time.
export CARGO_TARGET_DIR=$PWD/target/mutants CARGO_PROFILE_DEV_DEBUG=none
mkdir -p target/mutants
status=0

# group NAME FILES... -- TESTS... -- FILTERS...: judges the sample of the mutants in these files by the
# unit tests of the packages in `judges` and by these files of tests, as far as the filters let them.
group() {
    local name=$1 what=(--no-default-features --no-shuffle) all
    shift
    while [ "$1" != -- ]; do
        what+=("--file=$1")
        shift
    done
    shift
    what+=("${judges[@]/#/--test-package=}")
    # Only the tests that judge are built: linking all of them would take most of the time.
    local targets=(--cargo-arg=--lib)
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        targets+=("--cargo-arg=--test=$1")
        shift
    done
    if [ "$seed" != all ]; then
        all=$(cargo mutants "${what[@]}" --list | wc -l)
        echo "$name: $all mutants, of which one in $every"
        what+=(--sharding round-robin --shard "$((seed % every))/$every")
    fi
    cargo mutants "${what[@]}" --output "target/mutants/$name" --jobs "${JOBS:-1}" --timeout 120 \
        --colors never "${targets[@]}" -- "$@" || status=1
}

deciding=('crates/model/src/plan/**' 'crates/model/src/spec/**' 'crates/model/src/topology/**')
supervisor=('crates/supervise/src/core/**')
tasks=('crates/native/src/tasks/core/**')
every=1
if [ "$seed" != all ]; then
    files=("${deciding[@]}" "${supervisor[@]}" "${tasks[@]}")
    all=$(cargo mutants --no-default-features --list "${files[@]/#/--file=}" | wc -l)
    every=$(((all + wanted - 1) / wanted))
fi
tests=(plan spec topo)
judges=(cuda-cluster-model cuda-cluster)
group deciding "${deciding[@]}" -- "${tests[@]}" --
judges=(cuda-cluster-supervise)
group supervisor "${supervisor[@]}" -- -- core::
judges=(cuda-cluster-native)
group tasks "${tasks[@]}" -- -- tasks::
echo "mutants that live:"
cat target/mutants/*/mutants.out/missed.txt
exit "$status"
