"""What torch is told of operations, and which device a kernel is launched on."""

from contextlib import contextmanager

import pytest
import torch
from on_gpu.inputs import MAKERS, Maker, Size
from on_gpu.operations import OPERATIONS
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle31_hf.kernels import operation
from eagle31_hf.kernels.joint_linear import joint_linear

SMALL = Size(2, 3, 8, 4, 2, 8, 5, 20, 4, 7)
WITHOUT = {  # an argument by its place, and what stands for none
    "add_rms_norm": (1, None), "rope_append": (2, []), "likeliest_tokens": (3, None), "quantized_linear": (3, None),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_as_it_is_declared(name):
    """What it writes to, its shapes without values, and its gradient; also without what may be left out."""
    args = list(MAKERS[name](Maker(SMALL, torch.float32, torch.device("cpu"))).args)
    torch.library.opcheck(OPERATIONS[name]._op, tuple(args))
    if name in WITHOUT:
        place, none = WITHOUT[name]
        args[place] = none
        torch.library.opcheck(OPERATIONS[name]._op, tuple(args))


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, whatever its arguments lie on."""
    current = [torch.device("cuda:1")]

    @contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(operation, "why_torch", lambda name, device: None)
    monkeypatch.setattr(joint_linear, "kernel", lambda: lambda *args: current[-1])
    with FakeTensorMode():
        elsewhere = torch.empty(2, 8, device="cuda:0")
    assert joint_linear.run(elsewhere, [elsewhere], []) == torch.device("cuda:0")
    assert current == [torch.device("cuda:1")]
