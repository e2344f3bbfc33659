"""`python cuda_cluster_fork SETTINGS`: imports what ranks need, and forks them (`warm`)."""

import os
import sys

if __name__ == "__main__":
    # Python put this directory first; the package is found from the one above, and then nothing is.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from cuda_cluster_fork import warm

    # Returns in each rank, whose program then runs below no more than this line.
    warm.serve(sys.argv[1]).run()
