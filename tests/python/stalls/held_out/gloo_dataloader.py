"""The workers of a DataLoader are forked while a thread has the lock of the image cache."""

import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

cache_lock = threading.Lock()


def refresh_cache():
    with cache_lock:
        time.sleep(3)


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        with cache_lock:
            return torch.zeros(8)


def train_epoch(loader):
    for batch in loader:
        dist.all_reduce(batch)


def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        threading.Thread(target=refresh_cache).start()
        time.sleep(0.2)
    train_epoch(DataLoader(Images(), batch_size=8, num_workers=2))


if __name__ == "__main__":
    main()
