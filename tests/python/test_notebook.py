"""A notebook, executed by a kernel of Jupyter's own."""

import pytest
from conftest import MACHINE

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


def test_a_notebook_that_forgets_its_cluster_leaves_nothing():
    execute(CELLS[:3])
