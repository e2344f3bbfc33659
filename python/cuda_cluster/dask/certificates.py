"""Certificates for TLS: from Dask's `Security` to files for the program, and back.

*Invariant:* who else uses this machine can't read a file that is made here, and none outlives this
process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from distributed import Security


def flags(security: Security, release: contextlib.ExitStack) -> dict[str, str]:
    """The files of a cluster, as flags of the program: see `files`."""
    own = {
        "tls_ca_file": security.tls_ca_file,
        "tls_cert": security.tls_scheduler_cert,
        "tls_key": security.tls_scheduler_key,
    }
    worker = (security.tls_worker_cert, security.tls_worker_key)
    if None not in worker and worker != (own["tls_cert"], own["tls_key"]):
        raise ValueError("security has different certificates for scheduler and workers; give both the same")
    return files(own, release)


def of_workers(security: Security, release: contextlib.ExitStack) -> dict[str, str]:
    """The files of workers that join a scheduler elsewhere, or none without TLS: see `files`."""
    # Who was handed a client's certificates has no others.
    for cert, key in (
        (security.tls_worker_cert, security.tls_worker_key),
        (security.tls_client_cert, security.tls_client_key),
    ):
        if cert is not None:
            return files({"tls_ca_file": security.tls_ca_file, "tls_cert": cert, "tls_key": key}, release)
    return {}


def files(own: Mapping[str, str | None], release: contextlib.ExitStack) -> dict[str, str]:
    """The files, by their flags. For certificates in memory there are files in memory until the
    release."""
    flags: dict[str, str] = {}
    for name, value in own.items():
        if value is None:
            raise ValueError(f"security lacks {name}, without which there is no TLS")
        if "\n" in value:
            file = release.enter_context(open(os.memfd_create(name), "w"))
            file.write(value)
            file.flush()
            # Processes of this user open it there while this one lives; the cluster lives no longer.
            value = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        flags[name] = os.path.abspath(value)
    return flags


def of_environment(env: Mapping[str, str]) -> Security:
    """What a client needs to connect to a cluster with this environment."""
    prefix = "DASK_DISTRIBUTED__COMM__TLS__"
    if f"{prefix}CA_FILE" not in env:
        return Security()
    return Security(
        require_encryption=True,
        tls_ca_file=env[f"{prefix}CA_FILE"],
        tls_client_cert=env[f"{prefix}CLIENT__CERT"],
        tls_client_key=env[f"{prefix}CLIENT__KEY"],
    )
