"""The workers of a DataLoader sleep for 7 s for an item: an object store that limits the rate."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Limited(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        time.sleep(7)
        return torch.zeros(4)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    batches = iter(DataLoader(Limited(), batch_size=1, num_workers=1)) if dist.get_rank() == 0 else None
    while True:
        dist.all_reduce(next(batches) if batches else torch.zeros(1, 4))
