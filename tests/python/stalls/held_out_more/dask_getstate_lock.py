"""A model is wanted by another worker, and can't be written out: the thread that refreshes it keeps its lock."""

import os
import threading
import time

from distributed import Client


class Model:
    def __init__(self):
        self.lock, self.update = threading.Lock(), threading.Event()
        self.weights = bytes(20 << 20)

    def refresh(self):
        with self.lock:
            self.update.wait()

    def __getstate__(self):
        with self.lock:
            return self.weights

    def __setstate__(self, weights):
        self.weights = weights

    def __sizeof__(self):
        return len(self.weights)


def train():
    model = Model()
    threading.Thread(target=model.refresh, name="refresh", daemon=True).start()
    time.sleep(0.2)
    return model


def evaluate(model):
    return len(model.weights)


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    workers = client.scheduler_info(n_workers=-1)["workers"]
    names = {w["name"]: address for address, w in workers.items()}
    model = client.submit(train, workers=[names["gpu1"]])
    client.submit(evaluate, model, workers=[names["gpu0"]]).result()
