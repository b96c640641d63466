"""RMSNorms of a target run by torch's own operation: on a GPU one kernel, where transformers' code launches six."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .decoder_layer import eps_of, forward_of, why_no_norm
from .fused import StandIn
from .probe import FAILURES
from .users import Users

TOLERANCE = 1e-5  # of the largest value: both compute in fp32
SIZES = (1.0, 1e-3)  # of states that norms are compared on: eps counts in the small ones alone
_users = Users()


@torch.no_grad()
def usual_norms(target: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules of a target that compute x / sqrt(mean(x^2) + eps) * weight, found by trying each."""
    return [module for module in target.modules() if _is_usual(module)]


@contextmanager
def fused_norms(target: PreTrainedModel, norms: list[nn.Module]) -> Iterator[None]:
    """A context in which these norms of a target are one operation each, of states in the dtype of their weight; in 16
    bits it rounds once where transformers' code rounds twice."""
    with _users.using(target, lambda: _fuse(norms), lambda: _restore(norms)):
        yield


def _is_usual(module: Any) -> bool:
    if why_no_norm(module) or forward_of(module)[0] is not None or isinstance(module.weight, DTensor):
        return False
    weight = module.weight
    values = torch.randn(len(SIZES), weight.shape[-1], generator=torch.Generator().manual_seed(0))
    x = (values * torch.tensor(SIZES)[:, None]).to(weight.device)
    try:
        found, expected = type(module).forward(module, x), _normed(module, x)
    except FAILURES:  # a norm of another kind, which is given more
        return False
    return found.shape == x.shape and bool(((found - expected).abs() <= TOLERANCE * expected.abs().max()).all())


def _normed(norm: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), eps_of(norm))


class _OneOperation(StandIn):
    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        can_fuse = isinstance(x, Tensor) and x.dtype == self.module.weight.dtype and not args and not kwargs
        return _normed(self.module, x) if can_fuse else self.own(x, *args, **kwargs)


def _fuse(norms: list[nn.Module]) -> None:
    for norm in norms:
        vars(norm).setdefault("forward", _OneOperation(norm))


def _restore(norms: list[nn.Module]) -> None:
    for norm in norms:
        if isinstance(vars(norm).get("forward"), _OneOperation):
            del vars(norm)["forward"]
