"""`dask_cuda.initialize`, where dask-cuda is not installed. Workers have their contexts from us."""

import click
from cuda_cluster.dask.client import initialize

__all__ = ["dask_setup", "initialize"]


@click.command()
@click.option("--create-cuda-context/--no-create-cuda-context", default=False)
def dask_setup(worker, create_cuda_context):
    """Nothing is left to do when a worker loads this."""
