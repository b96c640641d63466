"""Random numbers that depend on seeds alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which torch's random numbers depend on `seed` alone; numbers drawn after it do not depend on it."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def generator_of(*numbers: int) -> torch.Generator:
    """Returns a generator of the CPU for these numbers, as seed, step and process; others give another."""
    return torch.Generator().manual_seed(int.from_bytes(sha256(repr(numbers).encode()).digest()[:8], "little"))
