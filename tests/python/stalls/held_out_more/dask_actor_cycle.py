"""Two actors ask each other for their values, each from within a method, while an actor runs one method at a time."""

import os
import time

from distributed import Client


class Shard:
    def meet(self, other):
        self.other = other

    def value(self):
        return 1

    def exchange(self):
        time.sleep(1)
        return self.other.value().result()


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    workers = client.scheduler_info(n_workers=-1)["workers"]
    names = {w["name"]: address for address, w in workers.items()}
    one, two = (
        client.submit(Shard, actor=True, pure=False, workers=[names[name]]).result()
        for name in ("gpu0", "gpu1")
    )
    one.meet(two).result()
    two.meet(one).result()
    exchanges = [one.exchange(), two.exchange()]
    print([exchange.result() for exchange in exchanges])
