"""The tasks of bad days, which workers import (`bad_days.py`)."""

import time

import numpy as np


def piece(seed, size, seconds):
    time.sleep(seconds)
    return np.random.default_rng(seed).integers(0, 1 << 40, size)


def both(one, other, factor, seconds):
    time.sleep(seconds)
    size = min(len(one), len(other))
    return (one[:size] * factor + other[:size][::-1]) & ((1 << 40) - 1)


def digest(array):
    return int(array.sum()), len(array)
