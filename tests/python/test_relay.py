"""What workers print is seen where their cluster was started."""

import subprocess
import sys
import tempfile

import pytest
from conftest import MACHINE

pytestmark = pytest.mark.usefixtures("nothing_is_left")


#: A program with a task that prints, and one that fails.
PRINTS = """
import sys
from {module} import {name} as Cluster
from distributed import Client

def work(n):
    print("printed by a task")
    print("told by a task", file=sys.stderr)
    return 1 // n

if __name__ == "__main__":
    with Cluster(**{kwargs!r}) as cluster, Client(cluster) as client:
        assert client.submit(work, 1).result() == 1
        assert isinstance(client.submit(work, 0).exception(), ZeroDivisionError)
"""


def printed(kwargs, module="cuda_cluster.dask", name="LocalCUDACluster"):
    """What such a program shows: on standard output, and on standard error."""
    script = PRINTS.format(module=module, name=name, kwargs=kwargs)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        done = subprocess.run([sys.executable, file.name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_what_workers_print_is_seen_as_with_a_local_cluster():
    kwargs = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None, "protocol": "tcp"}
    ours, theirs = {**MACHINE, **kwargs}, {**kwargs, "dashboard_address": ":0"}
    for program in (printed(ours), printed(theirs, "distributed", "LocalCluster")):
        out, err = program
        assert out.count("printed by a task") == 2
        assert (out + err).count("told by a task") == 2
        assert "Compute Failed" in err and "ZeroDivisionError" in err
        assert "INFO" not in out + err
    out, err = printed({**ours, "silence_logs": "critical"})
    assert out.count("printed by a task") == 2 and "Compute Failed" not in out + err
    assert "ZeroDivisionError" not in out + err
    out, err = printed({**ours, "silence_logs": False})
    assert out.count("printed by a task") == 2 and "INFO" in err
    assert printed({**ours, "relay": False}) == ("", "")
