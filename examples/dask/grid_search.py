"""scikit-learn's search for the best settings, with joblib's backend `dask`: each fit is a task."""

import joblib
import numpy as np
from sklearn.datasets import make_classification
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import GridSearchCV
from workload import Workload, main

ROWS = 200_000
GRID = {"alpha": [1e-5, 1e-4, 1e-3, 1e-2], "penalty": ["l1", "l2"]}


def data_of(scale):
    return make_classification(max(300, int(ROWS * scale)), n_features=30, n_informative=10, random_state=7)


def scores(data):
    search = GridSearchCV(SGDClassifier(random_state=7, max_iter=50, tol=None), GRID, cv=4)
    search.fit(*data)
    return np.append(search.cv_results_["mean_test_score"], search.best_index_)


def make(client, scale):
    return data_of(scale)


def run(client, data):
    with joblib.parallel_backend("dask", client=client):
        return scores(data)


def expected(scale):
    return scores(data_of(scale))


WORKLOAD = Workload("joblib", "32 fits of 200,000 rows of 30 columns", make, run, expected, tolerance=1e-12)

if __name__ == "__main__":
    main(WORKLOAD)
