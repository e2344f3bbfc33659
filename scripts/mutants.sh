#!/usr/bin/env bash
# Mutation testing of what decides. cargo-mutants changes one thing in plan, spec, topology, or the
# core of the supervisor or of the task scheduler; the tests that start no process must notice.
#
#   scripts/mutants.sh [SEED [HOW_MANY]]    a sample, by default 300; another seed, another sample
#   scripts/mutants.sh all                  all of them
#
# JOBS=N for several at once. Takes hours on two cores. Ends with 0 only if no mutant lives; those that
# live are listed in target/mutants/mutants.out/missed.txt.
# To install cargo-mutants: scripts/setup.sh --mutants
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PWD/target/tools/bin:$PATH
seed=${1:-0} wanted=${2:-300}
command -v cargo-mutants >/dev/null || {
    echo "cargo-mutants is missing: scripts/setup.sh --mutants" >&2
    exit 2
}

files=(
    'src/plan/**' 'src/spec/**' 'src/topology/**'
    'src/supervise/core/**' 'src/engine/native/tasks/core/**'
)
what=("${files[@]/#/--file=}" --no-default-features --no-shuffle)
if [ "$seed" != all ]; then
    all=$(cargo mutants "${what[@]}" --list | wc -l)
    shards=$(((all + wanted - 1) / wanted))
    echo "mutants: about $wanted of $all, seed $seed"
    what+=(--sharding round-robin --shard "$((seed % shards))/$shards")
fi

# Of its own, so that nothing is built twice; without symbols, which take time.
export CARGO_TARGET_DIR=$PWD/target/mutants CARGO_PROFILE_DEV_DEBUG=none INSTA_UPDATE=no
judge=(cargo mutants "${what[@]}" --output target/mutants --jobs "${JOBS:-1}" --timeout 120 --colors never)
mkdir -p target/mutants

# The unit tests catch most of them, and are the quickest to build; the rest is for all tests.
"${judge[@]}" -- --lib && exit 0
tests=(plan_configs plan_flags plan_laws plan_machines plan_nics spec topo_forms topo_fuzz topo_matrix)
"${judge[@]}" --iterate -- --lib "${tests[@]/#/--test=}"
