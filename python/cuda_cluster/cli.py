"""`dask cuda worker` with dask-cuda's options, and `worker_command="cuda_cluster.cli"`.

Translates options into keywords of `CUDAWorker`, and executes the program in the same process, which
then handles signals.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from cuda_cluster import _table, program
from cuda_cluster.dask import client, cuda_worker
from cuda_cluster.errors import ClusterError

#: Options with a value.
_VALUES = (
    "host worker-port listen-address contact-address name memory-limit device-memory-limit "
    "rmm-pool-size rmm-maximum-pool-size rmm-release-threshold rmm-log-directory pid-file resources "
    "dashboard-address local-directory scheduler-file protocol interface death-timeout "
    "dashboard-prefix tls-ca-file tls-cert tls-key worker-class pre-import lifetime "
    "lifetime-stagger topology"
).split()

#: Options that are on or off, with the opposite.
_SWITCHES = {
    **{on.replace("_", "-"): off.removeprefix("--") for on, off in _table.OFF.items() if on != "verify"},
    # dask-jobqueue passes one of them; here the supervisor is the nanny.
    "nanny": "no-nanny",
}


def _with_options(command: Any) -> Any:
    for name in _VALUES:
        command = click.option(f"--{name}", type=str, default=None)(command)
    for on, off in _SWITCHES.items():
        command = click.option(f"--{on}/--{off}", default=None)(command)
    return command


@click.group
def cuda() -> None:
    """Subcommands to launch or query distributed workers with GPUs."""


@cuda.command(name="worker", context_settings={"ignore_unknown_options": True})
@click.argument("scheduler", type=str, required=False)
@click.argument("preload_argv", nargs=-1, type=click.UNPROCESSED)
@click.option("--nthreads", type=int, default=1, show_default=True)
@click.option("--nworkers", type=int, default=None, help="Workers; one for each GPU by default.")
@click.option("--cudf-spill-stats", type=int, default=0)
@click.option("--preload", type=str, multiple=True)
@click.option("--set-rmm-allocator-for-libs", "rmm_allocator_external_lib_list", default=None)
@click.option("--multiprocessing-method", default=None, help="Has no effect.")
@click.option("--simulate", is_flag=True, default=None, help="Rehearse without GPUs, with --topology.")
@_with_options
def worker(scheduler: str | None, preload_argv: tuple[str, ...], **options: Any) -> None:
    """Launch workers, one for each GPU, that join a scheduler.

    The options are those of dask-cuda; `cuda-cluster up --join` has more.
    """
    try:
        launch(scheduler, preload_argv, options)
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error
    except ClusterError as error:
        raise click.ClickException(str(error)) from error


def launch(scheduler: str | None, preload_argv: tuple[str, ...], options: dict[str, Any]) -> None:
    """Translates the options, and becomes the program."""
    if isinstance(scheduler, str) and scheduler.startswith("-"):
        raise ValueError(
            "The scheduler address can't start with '-'. Please check "
            "your command line arguments, you probably attempted to use "
            f"unsupported one. Scheduler address: {scheduler}"
        )
    if options.pop("multiprocessing_method", None) not in (None, "spawn", "fork", "forkserver"):
        raise click.BadParameter("multiprocessing method is one of spawn, fork, forkserver")
    given = {name: value for name, value in options.items() if value not in (None, "", ())}
    given.pop("nanny", None)
    tls = {name: given.pop(name, None) for name in ("tls_ca_file", "tls_cert", "tls_key")}
    n_workers = given.pop("nworkers", None)
    request = cuda_worker.translate({"scheduler": scheduler, "preload_argv": preload_argv, **given})
    request.flags |= {"n_workers": n_workers}
    request.flags |= {name: os.path.abspath(path) for name, path in tls.items() if path}
    client.prepare()
    flags, specs = cuda_worker.prepare(request)
    become(["up", *program.flags(flags)], program.SpecFiles(specs, flags))


def become(arguments: list[str], files: program.SpecFiles) -> None:
    """Executes the program in this process. The files that workers read stay open."""
    for descriptor in [*cuda_worker.kept(), *files.descriptors]:
        os.set_inheritable(descriptor, True)
    path = program.program_path()
    sys.stdout.flush()
    os.execv(path, [path, *arguments, *files.arguments])


@cuda.command(name="config", context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
def config(name: str | None) -> None:
    """Show a cluster of this machine: its workers and what they are bound to."""
    path = program.program_path()
    os.execv(path, [path, "ps", "-o", "wide", *([] if name is None else [name])])


def main() -> None:
    """`python -m cuda_cluster.cli [worker] SCHEDULER …`."""
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
    worker()


if __name__ == "__main__":
    main()
