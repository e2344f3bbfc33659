"""A notebook, executed by a kernel of Jupyter's own."""

import threading
import time

import pytest
from conftest import MACHINE, QUIET, eventually, files, others
from jupyter_client.manager import start_new_kernel

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.usefixtures("nothing_is_left")

CELLS = [
    "from cuda_cluster.dask import LocalCUDACluster\nfrom distributed import Client",
    f"cluster = LocalCUDACluster(**{MACHINE!r}, n_workers=2, dashboard_address=':0')\ncluster",
    "client = Client(cluster)\nclient.submit(sum, [1, 2]).result()",
    "cluster.scale(1)\ncluster",
    "client.close()\ncluster.close()",
    "cluster.status.name",
]


def execute(cells):
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    return client.execute()


def shown(cell):
    return {kind: text for out in cell.outputs for kind, text in out.get("data", {}).items()}


def test_a_notebook_shows_a_cluster_and_works_with_it():
    pytest.importorskip("ipywidgets")
    notebook = execute(CELLS)
    display = shown(notebook.cells[1])
    assert "application/vnd.jupyter.widget-view+json" in display
    assert "<svg" in display["text/html"] and "LocalCUDACluster" in display["text/plain"]
    assert shown(notebook.cells[2])["text/plain"] == "3"
    assert shown(notebook.cells[5])["text/plain"] == "'closed'"
    # The widget has a tab for the state and one for scaling, with what they say.
    widgets = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    texts = [str(one["state"].get("value", "")) for one in widgets.values()]
    assert any("Scaling mode: Manual" in text for text in texts)
    assert any("Workers: 2" in text for text in texts)
    buttons = {one["state"].get("description") for one in widgets.values()}
    assert {"Scale", "Adapt"} <= buttons


def test_what_tasks_print_is_shown_in_the_notebook():
    task = "def work():\n    print('printed by a task')\n    return 1 // 0\nfuture = client.submit(work)"
    # What is printed between two cells belongs to none.
    shown = "future.exception()\nimport time\ntime.sleep(3)"
    notebook = execute([*CELLS[:3], task, shown, *CELLS[4:]])
    streams = [out for cell in notebook.cells for out in cell.outputs if out.output_type == "stream"]
    shown = {name: "".join(one.text for one in streams if one.name == name) for name in ("stdout", "stderr")}
    assert shown["stdout"].count("printed by a task") == 1
    assert "Compute Failed" in shown["stderr"] and "ZeroDivisionError" in shown["stderr"]


def test_a_notebook_that_forgets_its_cluster_leaves_nothing():
    execute(CELLS[:3])


class Kernel:
    """A kernel whose cells can be interrupted."""

    def __enter__(self):
        self._manager, self._client = start_new_kernel(kernel_name="python3")
        return self

    def __exit__(self, *_):
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, cell):
        """Runs a cell; returns the name of its error, or None."""
        return self._client.execute_interactive(cell, timeout=300).get("content").get("ename")

    def interrupt(self, cell, after):
        """Interrupts a cell some seconds after it has printed something; returns the error's name."""
        printed = threading.Event()

        def shown(message):
            if message["msg_type"] == "stream":
                printed.set()

        def interrupt():
            assert printed.wait(300)
            time.sleep(after)
            self._manager.interrupt_kernel()

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            answer = self._client.execute_interactive(cell, timeout=300, output_hook=shown)
        finally:
            printed.set()
            thread.join()
        return answer["content"].get("ename")

    def restart(self):
        self._manager.restart_kernel(now=True)
        self._client.wait_for_ready(timeout=300)


def test_ctrl_c_is_for_the_cell_and_not_for_the_cluster():
    with Kernel() as kernel:
        assert kernel.run("\n".join(CELLS[:3])) is None
        wait = "import time\nprint('waits', flush=True)\nclient.submit(time.sleep, 600).result()"
        assert kernel.interrupt(wait, 0.5) == "KeyboardInterrupt"
        assert kernel.run("assert client.submit(sum, [1, 2], pure=False).result() == 3") is None
        kernel.restart()
        eventually(lambda: not clusters(), "the cluster has ended with its kernel")


@pytest.mark.parametrize("seconds", [0.1, 0.6])
def test_ctrl_c_while_it_starts_leaves_nothing(seconds):
    with Kernel() as kernel:
        start = f"{CELLS[0]}\nprint('starts', flush=True)\nLocalCUDACluster(**{QUIET!r})\ntime.sleep(60)"
        assert kernel.interrupt("import time\n" + start, seconds) == "KeyboardInterrupt"
        eventually(lambda: not clusters() and not files(), "nothing is left, though the kernel lives")


def clusters():
    return [one for one in others() if "ipykernel" not in one[1]]
