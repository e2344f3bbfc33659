#!/usr/bin/env bash
# Sets up and runs the tests, with everything they need installed first. Says at the end what was
# skipped and how many passed, failed and were skipped; ends as `cargo test` does.
#
#   scripts/test.sh [ARGUMENTS OF cargo test]     without any: also the lints, the rules of the house,
#                                                 and that each part builds without those above it
#   CUDA_CLUSTER_THREADS=2              tests at a time in each of the two parts that run side by side
#   CUDA_CLUSTER_REQUIRE=dask,root      what there must be: no test is skipped for want of it
#   CUDA_CLUSTER_SECOND_TRY=5           up to so many failures are tried once more, alone; those that
#                                       pass then are named as unsteady, and are to be mended
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Stories make and remove very many files, for which most disks take ten times as long as memory does. Others
# don't see this /tmp; what was there of this project stays.
if [ -z "${CUDA_CLUSTER_TMP:-}" ] && [ "$(id -u)" -eq 0 ] &&
    unshare --mount --propagation private scripts/own-tmp.sh true 2>/dev/null; then
    CUDA_CLUSTER_TMP=memory exec unshare --mount --propagation private scripts/own-tmp.sh scripts/test.sh "$@"
fi
scripts/setup.sh --debian
# shellcheck disable=SC1091
[ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CUDA_CLUSTER_SKIPS=$scratch/skips
touch "$CUDA_CLUSTER_SKIPS"
say() { echo "== $(date -u +%H:%M:%S) $*"; }
# Always the same choice: for another one cargo builds others' crates anew, with other features.
crates=(--locked --workspace --exclude bindgen --exclude tidy)

# What else the tests need comes over the network for the most part, and the compiler needs the CPUs. Bash has what
# it puts into the background ignore Ctrl-C, also in what that starts.
env --default-signal=INT,QUIT bash -c 'scripts/setup.sh --tests && scripts/oldest-ucx.sh && scripts/ucx-versions.sh' \
    > "$scratch/setup" 2>&1 &
installing=$!
say "building, and installing what the tests need"
# What Python loads, the program and the examples, which tests use; and each test program: how cargo is asked
# for it, its package's folder, and where it is.
what=(--lib --bins --examples)
[ $# -gt 0 ] || what+=(--tests)
cargo build "${crates[@]}" "${what[@]}" --message-format=json-render-diagnostics | python3 -c '
import json, os, sys
for line in sys.stdin:
    made = json.loads(line)
    if made.get("executable") and made["profile"]["test"]:
        folder, [kind, *_] = os.path.dirname(made["manifest_path"]), made["target"]["kind"]
        name = {"test": "--test " + made["target"]["name"], "bin": "--bin " + made["target"]["name"]}.get(kind, "--lib")
        package = made["package_id"].rpartition("#")[2].partition("@")[0]
        package = os.path.basename(folder) if package[:1].isdigit() else package
        print(f"-p {package} {name}", folder, made["executable"], sep="\t")
' > "$scratch/programs"
wait "$installing" && installed=0 || installed=$?
cat "$scratch/setup"
[ "$installed" -eq 0 ] || exit "$installed"

export CUDA_CLUSTER_BUILT=1 # tests build nothing themselves

status=0 lints=0 tests=0
# Runs the test programs that these words choose, as they are built: asked for some of them, cargo would build
# these and the program under test anew, with other features of others' crates, while the rest use it.
run() {
    grep "${@:2}" "$scratch/programs" | while IFS=$'\t' read -r what folder program; do
        echo "     Running $what"
        (cd "$folder" && CARGO_MANIFEST_DIR=$folder exec env --default-signal=INT,QUIT "$program") < /dev/null ||
            printf '%s\t' "$what" "$folder" "$program" | sed 's/\t$/\n/' >> "$scratch/failed"
    done | tee "$scratch/$1.output"
}

# What compiles, at the lowest priority: most stories of processes wait, and leave it time.
aside() {
    nice -n 19 scripts/lint.sh || : > "$scratch/lints"
    nice -n 19 scripts/features.sh || : > "$scratch/status"
    nice -n 19 scripts/comm-tests.sh | tee "$scratch/comm.output" || : > "$scratch/status"
    nice -n 19 cargo test --locked --package tidy | tee "$scratch/tidy.output" || : > "$scratch/status"
}

if [ $# -eq 0 ]; then
    say "running them in two parts side by side, and the lints beside both"
    export RUST_TEST_THREADS=${CUDA_CLUSTER_THREADS:-2}
    aside > "$scratch/aside" 2>&1 &
    run python -e '--test python\>' > "$scratch/python" 2>&1 &
    run stories -v -e '--test python\>' -e '--test wheel\>' 2>&1
    wait
    unset RUST_TEST_THREADS
    say "what users of Python see"
    cat "$scratch/python"
    say "the lints, and the rules of the house"
    cat "$scratch/aside"
    say "what builds into the folder where the others look for the program"
    cargo test "${crates[@]}" --doc | tee "$scratch/doc.output" || : > "$scratch/status"
    run wheel -e '--test wheel\>' 2>&1
    say "done"
    [ ! -e "$scratch/failed" ] || tests=1
else
    all=(--no-fail-fast)
    for argument in "$@"; do
        [ "$argument" = -- ] && break
        [ "$argument" = --no-fail-fast ] && all=()
    done
    cargo test "${crates[@]}" "${all[@]}" "$@" | tee "$scratch/asked.output" || tests=$?
fi
[ ! -e "$scratch/lints" ] || lints=1
[ ! -e "$scratch/status" ] || status=1
cat "$scratch"/*.output > "$scratch/output"
begun=$(grep -cE '^running [0-9]+ tests?$' "$scratch/output" || true)
ended=$(grep -c '^test result:' "$scratch/output" || true)
count() { awk -v word="$1" '/^test result:/ { for (i = 2; i <= NF; i++) if ($i ~ "^" word) n += $(i - 1) } END { print n + 0 }' "$2"; }
passed=$(count passed "$scratch/output") failed=$(count failed "$scratch/output")

# A test may fail for the load of all the others; what is really wrong fails again.
unsteady=0
if [ -e "$scratch/failed" ] && [ "$begun" -eq "$ended" ] && [ "$failed" -gt 0 ] &&
    [ "$failed" -le "${CUDA_CLUSTER_SECOND_TRY:-0}" ]; then
    mapfile -t names < <(sed -n 's/^test \([^ ]*\) \.\.\. FAILED$/\1/p' "$scratch/output")
    while IFS=$'\t' read -r what folder program; do
        echo "     Running $what once more"
        (cd "$folder" && CARGO_MANIFEST_DIR=$folder exec "$program" --exact "${names[@]}") < /dev/null || true
    done < "$scratch/failed" | tee "$scratch/again"
    if [ "$(count passed "$scratch/again")" -eq "$failed" ] && [ "$(count failed "$scratch/again")" -eq 0 ]; then
        unsteady=$failed passed=$((passed + failed)) failed=0 tests=0
    fi
fi
[ "$status" -ne 0 ] || status=$tests

# libtest counts a test that was skipped among those that passed.
skips=$(sort -u "$CUDA_CLUSTER_SKIPS")
skipped=$(printf '%s' "$skips" | grep -c '' || true)
ignored=$(count ignored "$scratch/output")
if [ "$skipped" -gt 0 ]; then
    echo "$skipped skipped for want of something:"
    printf '%s\n' "$skips" | sed 's/^/  /'
fi
[ "$ignored" -eq 0 ] || echo "$ignored ignored: they run only when asked for"
if [ "$unsteady" -gt 0 ]; then
    echo "$unsteady passed only at the second try, alone, and are to be mended:"
    printf '  %s\n' "${names[@]}"
fi
if [ "$begun" -ne "$ended" ] || { [ "$status" -ne 0 ] && [ "$failed" -eq 0 ]; }; then
    echo "not every test came to its end: cargo test ended with $status"
else
    echo "$((passed - skipped)) passed, $failed failed, $((skipped + ignored)) skipped"
fi
[ "$lints" -eq 0 ] || echo "the lints found something: scripts/lint.sh"
[ "$status" -ne 0 ] || status=$lints
exit "$status"
