"""The optimizer of a run: Muon for the drafter's matrices, the one that transformers would take for everything else.

One rate should suit drafters of every width (arXiv 2310.17813; `examples/transfer_rate.py` tries it on small ones).
Muon makes every direction of a matrix's update equally large: with the adjustment "original" its largest singular value
is the rate times sqrt(max(1, rows / columns)), however wide. Weights of norms are of the size of 1 at every width.
AdamW's update of a head moves a logit by as many steps as the drafter is wide, so its rate falls as 1 / width.

Muon keeps one state for a weight, AdamW two.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..modeling import Eagle31DrafterModel
from .arguments import Eagle31TrainingArguments
from .saving import read_record

ALIKE = {"adamw_torch_fused": "adamw_torch"}  # optimizers with the same states
MUON = "muon"  # in training.json
STATES = "optimizer"  # how the names of files begin that hold an optimizer's states
MOMENTUM = 0.95
ADJUSTMENT = "original"
# Where drafters are wider, the rate of their head and of embeddings of their own is that share of `learning_rate`.
TABLE_RATE_WIDTH = 128


class JoinedOptimizer(Optimizer):
    """Several optimizers as one, as a Trainer wants it. Each keeps its own parameters, states and kind of step; the
    groups of all are the groups of this one, in the order of `parts`."""

    def __init__(self, parts: Sequence[Optimizer]):
        self.parts = list(parts)
        # schedules that end at a rate of their own read the first rate here
        super().__init__([group for part in parts for group in part.param_groups], dict(parts[0].defaults))

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The states of all parameters, by the parameter; to read, the parts hold them."""
        return MappingProxyType({parameter: state for part in self.parts for parameter, state in part.state.items()})

    @state.setter
    def state(self, state: Any) -> None:
        """Takes the empty state that `Optimizer` sets when it is made, and no other."""
        if state:
            raise AttributeError("the states of joined optimizers are their own; expected load_state_dict.")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step with every part. Returns what `closure` returns, which is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the states and groups of all parts in the form of one optimizer's, parameters numbered through."""
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for part in self.parts:
            found, first = part.state_dict(), sum(len(group["params"]) for group in groups)
            states |= {first + number: state for number, state in found["state"].items()}
            groups += [group | {"params": [first + n for n in group["params"]]} for group in found["param_groups"]]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives each part its own from what `state_dict` returned. Raises ValueError, as they do, for another number of
        groups or parameters."""
        groups = list(state_dict["param_groups"])
        for part in self.parts:
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            names = [name for group in own for name in group["params"]]
            states = {name: state_dict["state"][name] for name in names if name in state_dict["state"]}
            part.load_state_dict({"state": states, "param_groups": own})
        if groups:
            raise ValueError(f"the state has {len(groups)} parameter groups more than the optimizer.")
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def train(self) -> None:
        """Tells those parts that know the difference that training goes on."""
        for part in self.parts:
            getattr(part, "train", lambda: None)()

    def eval(self) -> None:
        """Tells those parts that know the difference that weights are about to be used or saved."""
        for part in self.parts:
            getattr(part, "eval", lambda: None)()


def matrices_of(drafter: Eagle31DrafterModel) -> list[Tensor]:
    """Returns the trained matrices of `fc` and layers. Tables of tokens are none: their rows are not directions."""
    tables = {id(module.weight) for module in (drafter.embed_tokens, drafter.lm_head) if module is not None}
    return [p for p in drafter.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in tables]


def new_muon(matrices: Sequence[Tensor], rate: float, weight_decay: float) -> Optimizer:
    """Makes the optimizer of matrices."""
    return torch.optim.Muon(matrices, lr=rate, momentum=MOMENTUM, weight_decay=weight_decay, adjust_lr_fn=ADJUSTMENT)


def slow_down_tables(optimizer: Optimizer, drafter: Eagle31DrafterModel) -> None:
    """Gives the drafter's head and embeddings, where they are trained, a group of their own, whose rate falls with the
    width; groups that hold nothing are dropped."""
    tables = {id(module.weight) for module in (drafter.lm_head, drafter.embed_tokens) if module is not None}
    for group in list(optimizer.param_groups):
        slow = [parameter for parameter in group["params"] if id(parameter) in tables]
        if slow:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in tables]
            factor = min(1.0, TABLE_RATE_WIDTH / drafter.config.hidden_size)
            own = {name: value for name, value in group.items() if name != "params"}
            optimizer.add_param_group(own | {"params": slow, "lr": group["lr"] * factor})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def check_same(checkpoint: str | Path, names: dict[str, str]) -> None:
    """Raises ValueError for a checkpoint that was trained by other optimizers than `names`: its states mean nothing to
    these. One without optimizer states suits every run."""
    if not any(Path(checkpoint).glob(f"{STATES}*")):
        return
    saved = read_record(checkpoint).get("optimizer", names)
    if [ALIKE.get(name, name) for name in saved.values()] != [ALIKE.get(name, name) for name in names.values()]:
        with_muon = "a rate" if saved["matrices"] == MUON else "None (--matrix-learning-rate none)"
        raise ValueError(
            f"{checkpoint}: {saved['matrices']} trained its matrices and {saved['rest']} the rest, and in this run"
            f" {names['matrices']} and {names['rest']} would; expected the same. Resume with matrix_learning_rate set"
            f" to {with_muon}, and the optim of then."
        )


def with_muon(
    make_rest: Callable[[], Optimizer], drafter: Eagle31DrafterModel, args: Eagle31TrainingArguments, flattens: bool
) -> JoinedOptimizer:
    """Makes Muon for the drafter's matrices, and by `make_rest` what trains everything else. Raises ValueError where
    there are no matrices, or the backend `flattens` them."""
    matrices = matrices_of(drafter)
    if flattens or not matrices:
        raise ValueError(
            "matrix_learning_rate is set, and Muon has no whole matrix of fc and layers to train: none asks for"
            " gradients, or DeepSpeed or FSDP1 flattens them. Expected FSDP2 (fsdp_config={'version': 2}), or"
            " matrix_learning_rate=None."
        )
    for matrix in matrices:
        matrix.requires_grad_(False)  # an optimizer takes what asks for gradients
    try:
        rest = make_rest()
    finally:
        for matrix in matrices:
            matrix.requires_grad_(True)
    slow_down_tables(rest, drafter)
    return JoinedOptimizer([rest, new_muon(matrices, args.matrix_learning_rate, args.weight_decay)])
