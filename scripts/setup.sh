#!/usr/bin/env bash
# Installs what cuda-cluster needs to build, run and be tested on Debian or Ubuntu. Running it again
# does nothing. Without root it says what is missing and how to install it.
#
#   scripts/setup.sh            build and run
#   scripts/setup.sh --tests    also what the tests need
#   scripts/setup.sh --debian   of that the Debian packages alone
#   scripts/setup.sh --arm      also what scripts/wheel.sh --target aarch64 needs on x86-64, and arm-check.sh
#   scripts/setup.sh --mutants  also cargo-mutants, into target/tools, for scripts/mutants.sh
#   scripts/setup.sh --rivals   also Ray, into .venv-rivals, for scripts/bench-tasks.sh and -objects.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=(
    ca-certificates curl git      # crates
    gcc g++ make pkg-config       # C code in crates
    autoconf automake libtool     # ucx1-sys builds UCX's headers and library from source
    libclang-dev clang            # its bindings
    libhwloc-dev                  # hwloc2
)
run=(
    libucx0                       # the UCX that workers open at run time
    libhwloc15
)
tests=(
    python3 python3-venv          # checks in Python
    shellcheck                    # these scripts
    openssl                       # a certificate for Dask over TLS
    ucx-utils                     # ucx_perftest, the measure for the data plane
    chromium chromium-driver      # the page in a real browser
    prometheus                    # reads our metrics as people do
    slurmctld slurmd slurm-client munge    # a Slurm of this machine, with a configuration of its own
    openssh-server                # an sshd for each of several hosts, likewise
)
rivals=(python3 python3-venv ucx-utils)
arm=(
    mmdebstrap                    # scripts/arm.sh: a Debian with Rust's library for Arm
    qemu-user-static              # runs the program, which writes its pages
    libc6-dev-arm64-cross         # for that, and headers for bindings
    binutils-aarch64-linux-gnu    # ar, strip
    qemu-system-arm cpio          # scripts/arm-check.sh: a machine with a kernel of its own
)

say() { printf 'setup: %s\n' "$*"; }
installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

case "${1:-}" in
'' | --tests | --debian | --arm | --mutants | --rivals) ;;
*)
    say "no option $1; there are --tests, --debian, --arm, --mutants and --rivals"
    exit 2
    ;;
esac
wanted=("${build[@]}" "${run[@]}")
[[ ${1:-} = --tests || ${1:-} = --debian ]] && wanted+=("${tests[@]}")
[ "${1:-}" = --arm ] && wanted+=("${arm[@]}")
[ "${1:-}" = --rivals ] && wanted+=("${rivals[@]}")

if ! command -v apt-get >/dev/null; then
    say "this script knows Debian and Ubuntu only; elsewhere install the equivalents of:"
    say "  ${wanted[*]}"
    exit 2
fi

# Before anything is installed, because a distribution's Rust is often too old.
if ! command -v cargo >/dev/null && [ -f "$HOME/.cargo/env" ]; then
    # shellcheck disable=SC1091
    . "$HOME/.cargo/env"
fi
needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n1)
if ! command -v cargo >/dev/null; then
    say "no Rust toolchain: install Rust $needed or newer with rustup (https://rustup.rs), then run this again"
    exit 2
fi
have=$(rustc --version | cut -d' ' -f2)
if [ "$(printf '%s\n%s\n' "$needed" "$have" | sort -V | head -n1)" != "$needed" ]; then
    if command -v rustup >/dev/null; then
        say "Rust $have is older than $needed: rustup update"
    else
        say "Rust $have ($(command -v rustc)) is older than $needed: install a newer one with rustup" \
            "(https://rustup.rs), then run this again"
    fi
    exit 2
fi

missing=()
for package in "${wanted[@]}"; do
    installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    root=()
    if [ "$(id -u)" -ne 0 ]; then
        if sudo -n true 2>/dev/null; then
            root=(sudo)
        else
            say "packages are missing, and this user may not install them; as root:"
            say "  apt-get update && apt-get install --no-install-recommends ${missing[*]}"
            exit 2
        fi
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${root[@]}" apt-get update -qq
    "${root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    # What tests alone need lets nobody in.
    if [[ " ${missing[*]} " == *" openssh-server "* ]] && command -v systemctl >/dev/null; then
        "${root[@]}" systemctl disable --now ssh.service ssh.socket >/dev/null 2>&1 || true
    fi
fi

if [ "${1:-}" = --tests ]; then
    for component in clippy rustfmt; do
        cargo "${component/rust/}" --version >/dev/null 2>&1 || rustup component add --quiet "$component"
    done
    # The Dask engine's tests, and a UCX that knows CUDA; what is installed stands in a copy of the list.
    for which in "" -oldest; do
        list=tests/python/requirements$which.txt venv=.venv$which
        if ! cmp -s "$list" "$venv/installed.txt"; then
            say "installing Dask and its friends into $venv"
            python3 -m venv "$venv"
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$list"
            cp "$list" "$venv/installed.txt"
        fi
    done
    scripts/programs.sh --install
    scripts/axe-core.sh
    .venv/bin/python scripts/source_tree.py
fi
if [ "${1:-}" = --mutants ] && ! [ -x target/tools/bin/cargo-mutants ]; then
    say "installing cargo-mutants into target/tools"
    cargo install --quiet --locked --root target/tools cargo-mutants@27.1.0
fi
if [ "${1:-}" = --rivals ] && ! cmp -s scripts/rivals.txt .venv-rivals/installed.txt; then
    say "installing Ray into .venv-rivals"
    python3 -m venv .venv-rivals
    .venv-rivals/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/rivals.txt
    cp scripts/rivals.txt .venv-rivals/installed.txt
fi
say "fetching crates"
cargo fetch --locked --quiet
say "done"
