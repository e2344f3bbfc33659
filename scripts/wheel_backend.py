"""Builds the wheel, for pip (PEP 517) and for `scripts/wheel.sh`, so that both give the same.

maturin puts one crate into a wheel, here the program. What else belongs into it is made before: the
program's manual pages and completions, which it writes itself, and the package's module in Rust
(`python/comm`), without which Dask has no direct://.

    python scripts/wheel_backend.py OUT SHARE [ARGUMENTS OF `maturin build`]

pip's arguments for maturin are in MATURIN_PEP517_ARGS or `--config-settings build-args=…`, for example
`--profile dev`. Needs what scripts/setup.sh installs.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import maturin
from maturin import build_sdist, prepare_metadata_for_build_wheel  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]

#: Where maturin looks for compiled modules of the package, and for files to install elsewhere.
MODULES = ROOT / "python/cuda_cluster"
DATA = ROOT / "cuda_cluster.data"

#: What PyO3 would ask a Python 3.10 for; none is needed to build for it.
PYTHON_310 = ROOT / "python/comm/pyo3-3.10.txt"

#: Where shells look for completions, under `share`.
COMPLETIONS = {
    "bash": "bash-completion/completions/cuda-cluster",
    "zsh": "zsh/site-functions/_cuda-cluster",
    "fish": "fish/vendor_completions.d/cuda-cluster.fish",
}


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 517's hook: for machines like this one."""
    given = maturin.get_maturin_pep517_args(config_settings)
    arguments = ["--compatibility", "linux", "--auditwheel", "skip", *given]
    with tempfile.TemporaryDirectory() as folder:
        return build(Path(wheel_directory), Path(folder, "data/share"), arguments).name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 660's hook: the package finds its module where cargo leaves it."""
    build_module(maturin.get_maturin_pep517_args(config_settings))
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build(out, share, arguments):
    """Builds the wheel into a folder and returns its path. What is in the folder `share` is installed
    under `share`, pages and completions too."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_pages([*runner(arguments), unpacked(pack(scratch, arguments), scratch)], share)
        # The tree is left as it was, whatever happens.
        add_modules(arguments, stack)
        DATA.unlink(missing_ok=True)
        stack.callback(DATA.unlink, missing_ok=True)
        DATA.symlink_to(share.resolve().parents[1])
        return pack(out, arguments)


def pack(out, arguments):
    """Has maturin build what is not built yet, and pack it; returns the wheel."""
    command = ["maturin", "build", "--locked", "--quiet", "--out", out.resolve()]
    profile = [] if "--profile" in arguments else ["--release"]
    # Our standard output is for the wheel's path.
    subprocess.run([*command, *profile, *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def unpacked(wheel, folder):
    """The program in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".data/scripts/cuda-cluster"))
        program = Path(archive.extract(name, folder))
    program.chmod(0o755)
    return program


def write_pages(program, share):
    """The manual pages and completions that the program, a command, writes."""
    pages = share / "man/man1"
    pages.mkdir(parents=True, exist_ok=True)
    subprocess.run([*program, "man", pages], check=True, stdout=subprocess.DEVNULL)
    for shell, name in COMPLETIONS.items():
        path = share / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            subprocess.run([*program, "completions", shell], check=True, stdout=file)


def add_modules(arguments, stack):
    """Puts the package's modules in Rust where maturin takes them from, until the stack is left.

    One is for any Python from 3.11 on (abi3). The stable ABI of 3.10 has no buffers, so there is one for
    it alone, which it prefers by its name. It is built first: the other one stays in cargo's folder,
    where the package in the source tree finds it.
    """
    machine = (options(arguments).target or platform.machine()).partition("-")[0]
    only = ["--no-default-features", "--features", "cuda-cluster/default,cuda-cluster-comm/python"]
    for name, *chosen in (
        (f"_comm.cpython-310-{machine}-linux-gnu.so", only, {"PYO3_CONFIG_FILE": str(PYTHON_310)}),
        ("_comm.abi3.so",),
    ):
        module = MODULES / name
        stack.callback(module.unlink, missing_ok=True)
        shutil.copy(build_module(arguments, *chosen), module)
        if options(arguments).strip == "true":
            subprocess.run([tool("strip", arguments), module], check=True)


def build_module(arguments, features=(), variables=()):
    """The package's module in Rust; returns its path."""
    chosen = options(arguments)
    command = ["cargo", "build", "--locked", "--lib", "--profile", chosen.profile, *features]
    # Together with the program's crate, with whose features its dependencies are built.
    command += ["--package", "cuda-cluster", "--package", "cuda-cluster-comm"]
    command += ["--target", chosen.target] if chosen.target else []
    command += ["--message-format", "json-render-diagnostics"]
    environment = {**os.environ, **dict(variables)}
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, env=environment)
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["target"]["name"] == "_comm":
            return next(file for file in message["filenames"] if file.endswith(".so"))
    raise RuntimeError("cargo has built cuda-cluster-comm, and names no library")


def tool(name, arguments):
    """A program of binutils that knows the files of the target."""
    machine = (options(arguments).target or platform.machine()).split("-")[0]
    return name if machine == platform.machine() else f"{machine}-linux-gnu-{name}"


def runner(arguments):
    """What runs a program of the target here: cargo's setting."""
    target = (options(arguments).target or "").replace("-", "_").upper()
    return os.environ.get(f"CARGO_TARGET_{target}_RUNNER", "").split()


def options(arguments):
    """What of maturin's arguments holds for the module, too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", default="release")
    parser.add_argument("--target")
    parser.add_argument("--strip", nargs="?", default="true", const="true")
    return parser.parse_known_args(arguments)[0]


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
