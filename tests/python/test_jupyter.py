"""The page in Jupyter: a server that has jupyter-server-proxy finds it and starts it when it is opened."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import cuda_cluster
import pytest
from conftest import MACHINE, eventually
from cuda_cluster import jupyter

pytest.importorskip("jupyter_server")
pytest.importorskip("jupyter_server_proxy")

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TOKEN = "0123456789abcdef"


class Server:
    """A Jupyter server of this machine."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        own = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "RUNTIME", "DATA")}
        options = [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--no-browser", "--allow-root"]
        options += [f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={TOKEN}"]
        self.log = open(folder / "log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", *options],
            env=os.environ | own,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, path, method="GET", **headers):
        headers = {"Authorization": f"token {TOKEN}", **{key.replace("_", "-"): one for key, one in headers.items()}}
        request = urllib.request.Request(self.address + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def end(self):
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    try:
        eventually(lambda: server.ask("/api/status")[0] == 200, "it answers")
        yield server
    finally:
        server.end()


def test_the_page_is_found_started_and_served_and_keeps_its_guards(server):
    with cuda_cluster.up(**MACHINE, n_workers=2, name="lab") as cluster:
        known = json.loads(server.ask("/server-proxy/servers-info")[1])["server_processes"]
        assert [(one["name"], one["launcher_entry"]["title"]) for one in known] == [("cuda-cluster", "cuda-cluster")]
        status, text = server.ask("/cuda-cluster/")
        assert status == 200 and "<title>cuda-cluster</title>" in text
        status, text = server.ask("/cuda-cluster/api/clusters")
        assert json.loads(text)["clusters"] == [{"name": "lab", "is_running": True}]
        before = cluster.state().workers[0].pid
        change = "/cuda-cluster/api/clusters/lab/restart/gpu0"
        for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": server.address}):
            assert server.ask(change, "POST", **headers)[0] == 403, headers
        assert cluster.state().workers[0].pid == before
        assert server.ask(change, "POST", Origin=server.address, X_Cuda_Cluster="page")[0] == 202
        eventually(lambda: cluster.state().workers[0].pid not in (None, before), "it is restarted")
        # Who does not know Jupyter's token gets its login.
        text = server.ask("/cuda-cluster/api/clusters", Authorization="token wrong")[1]
        assert '"clusters"' not in text and "password" in text


def test_what_is_told_to_jupyter_names_the_program_and_its_own_icon(monkeypatch):
    told = jupyter.panel()
    assert os.access(told["command"][0], os.X_OK) and "{unix_socket}" in told["command"]
    with open(told["launcher_entry"]["icon_path"]) as icon:
        assert icon.read().startswith("<svg")
    # Without the program the panel says so when it is opened; others have theirs.
    monkeypatch.setenv("CUDA_CLUSTER_BIN", "/nowhere")
    assert jupyter.panel()["command"][0] == "cuda-cluster"
