"""Which device a kernel is launched on."""

from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle31_hf.kernels import operation
from eagle31_hf.kernels.joint_linear import joint_linear


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
