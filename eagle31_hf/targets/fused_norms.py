"""RMSNorms of a target run by torch's own operation: on a GPU one kernel, where transformers' code launches six."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .decoder_layer import eps_of, forward_of, why_no_norm
from .probe import FAILURES
from .users import StandIn, Users, restore

TOLERANCE = 1e-5  # of the largest value: both compute in fp32
SIZES = (1.0, 1e-3)  # of states that norms are compared on: eps counts in the small ones alone
_users = Users()


class FusedNorm(StandIn):
    """A forward that stands in for a norm's own: torch's operation, where it is given states alone, in the dtype of
    the weight."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        can_fuse = isinstance(x, Tensor) and x.dtype == self.module.weight.dtype and not args and not kwargs
        return _normed(self.module, x) if can_fuse else self.own(x, *args, **kwargs)


@torch.no_grad()
def usual_norms(target: PreTrainedModel) -> list[FusedNorm]:
    """Returns forwards for the modules of a target that compute x / sqrt(mean(x^2) + eps) * weight, found by trying
    each. What is compiled is left as it is: it fuses its norms itself, and would be compiled anew for each of ours."""
    compiled = {
        id(part)
        for module in target.modules()
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for part in module.modules()
    }
    return [FusedNorm(part) for part in target.modules() if id(part) not in compiled and _is_usual(part)]


@contextmanager
def fused_norms(target: PreTrainedModel, norms: list[FusedNorm]) -> Iterator[None]:
    """A context in which these norms of a target are one operation each, of states in the dtype of their weight; in 16
    bits it rounds once where transformers' code rounds twice."""

    def fuse() -> None:
        for norm in norms:
            vars(norm.module).setdefault("forward", norm)

    with _users.using(target, fuse, lambda: restore([norm.module for norm in norms], FusedNorm)):
        yield


def _is_usual(module: Any) -> bool:
    """Returns whether a module is such a norm; one whose weight is elsewhere, or in parts, is none."""
    if why_no_norm(module) or forward_of(module)[0] is not None or isinstance(module.weight, DTensor):
        return False
    weight = module.weight
    try:
        with torch.device("cpu"):  # whatever the default device is
            values = torch.randn(len(SIZES), weight.shape[0], generator=torch.Generator().manual_seed(0))
            x = (values * torch.tensor(SIZES)[:, None]).to(weight.device)
        expected = _normed(module, x)
        is_same = (type(module).forward(module, x) - expected).abs() <= TOLERANCE * expected.abs().max()
        return bool(is_same.all()) and type(module).forward(module, x.to(weight.dtype)).dtype == weight.dtype
    except (*FAILURES, AssertionError):  # a norm of another kind
        return False


def _normed(norm: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), eps_of(norm))
