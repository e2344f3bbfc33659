"""`dask_cuda.cli`: `dask cuda worker`, `dask-cuda-worker`, and `python -m dask_cuda.cli`."""

from cuda_cluster.cli import config, cuda, main, worker

__all__ = ["config", "cuda", "worker"]

if __name__ == "__main__":
    main()
