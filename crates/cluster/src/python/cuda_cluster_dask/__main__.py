"""`python cuda_cluster_dask ROLE`: one process of a Dask cluster. Its settings are variables, for
every user of the machine can read arguments."""

import gc
import os
import sys

if __name__ == "__main__":
    # Imports make much that stays, and collections in between only look at it again.
    gc.disable()
    # Python put this directory first, where its modules would stand in the way of others of the
    # same name. The package is found from the directory above, and then nothing else is.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from cuda_cluster_dask import process

    del sys.path[0]
    process.main(*sys.argv[1:])
