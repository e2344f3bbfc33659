"""The workers of a DataLoader need 3 s of computing for an item."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            sum(range(10000))
        return torch.zeros(4)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for batch in (
        DataLoader(Slow(), batch_size=4, num_workers=1 if dist.get_rank() == 2 else 0)
        if dist.get_rank() == 2
        else iter(lambda: torch.zeros(4, 4), None)
    ):
        dist.all_reduce(batch)
