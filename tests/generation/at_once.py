"""Calls that run at the same time, and prompts of several lengths for them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

PROMPTS = [torch.tensor([ids]) for ids in ([1, 2, 3, 5, 8], [4, 4], [9, 0, 7, 7, 1, 6, 2, 2, 5], [3])]


def at_once(functions):
    """Runs all at the same time, in threads of their own."""
    barrier = Barrier(len(functions))

    def run(function):
        torch.set_num_threads(1)
        barrier.wait(timeout=60)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))
