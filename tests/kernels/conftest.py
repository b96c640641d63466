"""Tests of kernels run on a GPU where there is one."""

import pytest
import torch


@pytest.fixture
def on_the_gpu():
    """Tensors are made on the GPU, where there is one: there Triton compiles, and does not interpret."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield
