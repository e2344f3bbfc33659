#!/usr/bin/env bash
# A release, in the order in which a maintainer makes one. Nothing is published before the tag is pushed:
# .github/workflows/release.yml does that, with the same commands.
#
#   scripts/release.sh bump VERSION     writes the version everywhere, and today's date into CHANGELOG.md
#   scripts/release.sh check            what stops a release of this commit; lints workflows, image, recipe
#   scripts/release.sh build            all files of the release, into target/publish: wheels, Debian
#                                       packages and tarballs for x86-64 and 64-bit Arm, the source for pip,
#                                       crates, SBOMs, notes, provenance, checksums. On x86-64; Arm needs
#                                       what scripts/setup.sh --arm installs
#           --host-only                 for this machine's architecture alone
#           --check                     builds the commit twice, and compares
#           --no-verify                 does not compile the crates as they are packed
#   scripts/release.sh verify [FOLDER]  whether the files of a release are what it says they are
#   scripts/release.sh notes [VERSION]  what CHANGELOG.md says of it
#   scripts/release.sh publish-crates   uploads the crates of a tagged commit, for the workflow
#   scripts/release.sh tag [--sign]     after check: an annotated (or signed) tag of this commit
#
# `build` writes into target/ alone, and refuses a tree with changes that are not committed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC1091
[ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"

out=$PWD/target/publish
say() { printf 'release: %s\n' "$*"; }
fail() { printf 'release: %s\n' "$*" >&2; exit 1; }
papers() { python3 scripts/release_papers.py "$@"; }
version() { sed -n '0,/^version = "\(.*\)"/s//\1/p' Cargo.toml; }
committed() { [ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed: git status"; }

check() {
    local status=0 head tag
    tag=v$(version)
    (committed) || status=1
    papers problems || status=1
    head=$(git rev-parse HEAD)
    if [ "$(git rev-parse --quiet --verify "$tag^{commit}" || echo "$head")" != "$head" ]; then
        say "$tag is the tag of another commit: scripts/release.sh bump to a version that is not released yet"
        status=1
    fi
    if [ "${GITHUB_REF_TYPE:-}" = tag ] && [ "${GITHUB_REF_NAME:-}" != "$tag" ]; then
        say "this is the tag $GITHUB_REF_NAME, and Cargo.toml has $(version)"
        status=1
    fi
    cargo metadata --locked --format-version 1 >/dev/null || { say "Cargo.lock is not up to date"; status=1; }
    scripts/release-lint.sh || status=1
    [ "$status" = 0 ] || fail "$(version) can't be released"
    say "$(version) can be released once .ci/run passes, which this does not run"
}

# Cargo knows the order of their dependencies. These two are not published.
published=(--workspace --exclude cuda-cluster-comm --exclude tidy --locked)

# crates FOLDER ARGUMENTS: packs them.
crates() {
    rm -f "$1"/target/package/*.crate
    (cd "$1" && shift && cargo package --quiet "${published[@]}" "$@")
}

# The workflow's last word, with a token of the index.
publish_crates() {
    local tagged
    tagged=$(git tag --points-at HEAD)
    [ "$tagged" = "v$(version)" ] || [ "${GITHUB_REF:-}" = "refs/tags/v$(version)" ] ||
        fail "this commit has no tag v$(version): scripts/release.sh tag"
    cargo publish --no-verify "${published[@]}"
}

# source_for_pip FOLDER OUT: writes the source of a tree for pip.
source_for_pip() {
    local maturin
    maturin=$(ls "$PWD"/target/wheel/tools-*-*/bin/maturin | tail -n 1)
    (cd "$1" && SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$maturin" sdist --out "$2" >&2)
}

build() {
    local machines check=() verify=() argument machine place scratch head
    machines=("$(uname -m)")
    [ "${machines[0]}" = aarch64 ] || machines+=(aarch64)
    for argument; do
        case $argument in
        --host-only) machines=("$(uname -m)") ;;
        --check) check=(--check) ;;
        --no-verify) verify=(--no-verify) ;;
        *) fail "build has no $argument; see the top of $0" ;;
        esac
    done
    committed
    head=$(git rev-parse HEAD)
    command -v python3 >/dev/null || fail "there is no python3: apt-get install python3"
    rm -rf "$out"
    mkdir -p "$out"
    for machine in "${machines[@]}"; do
        say "building for $machine"
        place=target
        if [ "$machine" = "$(uname -m)" ]; then
            scripts/wheel.sh "${check[@]}"
        else
            place=target/$machine
            scripts/wheel.sh --target "$machine" "${check[@]}"
        fi
        cp "$place"/wheels/*.whl "$place"/dist/*.deb "$place"/dist/*.tar.xz "$out"
        cp "$place/wheel/sbom.json" "$out/cuda-cluster-$(version)-$machine.cyclonedx.json"
    done
    say "packing the source and the crates"
    source_for_pip . "$out"
    crates . "${verify[@]}"
    cp target/package/*.crate "$out"
    if [ ${#check[@]} -gt 0 ]; then
        scratch=$(mktemp -d)
        git clone --quiet . "$scratch/again"
        source_for_pip "$scratch/again" "$scratch"
        crates "$scratch/again" --no-verify
        (cd "$scratch" && sha256sum -- *.tar.gz && cd again/target/package && sha256sum -- *.crate) |
            (cd "$out" && sha256sum --check --quiet) || fail "a second build is different; it is in $scratch"
        rm -rf "$scratch"
    fi
    committed
    [ "$(git rev-parse HEAD)" = "$head" ] || fail "the tree went to another commit meanwhile: build again"
    write_papers
    say "done: $out"
    (cd "$out" && cat SHA256SUMS)
}

write_papers() {
    papers provenance "$out" >"target/provenance.json"
    papers recipe "$out/cuda_cluster-$(version).tar.gz" >"$out/recipe.yaml"
    papers notes >"$out/NOTES.md" || fail "the files are built, and there are no notes: scripts/release.sh bump"
    mv target/provenance.json "$out/cuda-cluster-$(version).intoto.json"
    (cd "$out" && sha256sum -- * >"$OLDPWD/target/SHA256SUMS")
    mv target/SHA256SUMS "$out/SHA256SUMS"
}

# verify: every file is in the list and as the list says, and so are the subjects of the provenance.
verify() {
    cd "${1:-$out}" || fail "no files of a release in ${1:-$out}"
    [ -f SHA256SUMS ] || fail "$PWD has no SHA256SUMS"
    sha256sum --check --strict --quiet SHA256SUMS || fail "files are not what they were"
    diff <(sed 's/^[^ ]* .//' SHA256SUMS | sort) <(find . -type f ! -name SHA256SUMS -printf '%P\n' | sort) ||
        fail "files that no checksum is of, or the other way round"
    python3 -c '
import json, sys
for subject in json.load(open(sys.argv[1]))["subject"]:
    print(subject["digest"]["sha256"], subject["name"], sep="  ")' cuda-cluster-*.intoto.json |
        sha256sum --check --strict --quiet || fail "the provenance is of other files"
    say "$(grep -c '' SHA256SUMS) files are as their checksums and their provenance say; nobody has signed these"
}

tag() {
    local how=--annotate
    case ${1:-} in '') ;; --sign) how=--sign ;; *) fail "tag has no $1; see the top of $0" ;; esac
    check
    ! git rev-parse --quiet --verify "refs/tags/v$(version)" >/dev/null || fail "there is a tag v$(version)"
    { printf 'cuda-cluster %s\n\n' "$(version)" && papers notes; } |
        git tag "$how" --cleanup=verbatim --file=- "v$(version)"
    say "tagged; git push origin v$(version) releases it"
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
bump | notes) papers "$command" "$@" ;;
check | build | verify | tag) "$command" "$@" ;;
publish-crates) publish_crates ;;
*) fail "which of bump, check, build, verify, notes, tag? See the top of $0" ;;
esac
