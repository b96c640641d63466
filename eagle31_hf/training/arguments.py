"""The arguments of a training run: transformers' own, with defaults that suit drafters, and those of a drafter."""

from dataclasses import dataclass, field, fields
from math import inf
from numbers import Integral, Real
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from .loss_mask import CONVENTIONS, NORMALISATIONS
from .losses import DEFAULT_LOSS, parse_mixture
from .objective import MAX_DEPTH, Settings

BEST = "accepted_length"  # loss goes on falling where acceptance no longer rises
# fields that may be None, each with a number of the kind it is otherwise
NUMBERS = {"learning_rate": 0.0, "matrix_learning_rate": 0.0, "position_reach": 0}
MATRIX_RATE = 0.02  # matrix_learning_rate
RATE, RATE_ALONE = 4e-3, 1e-4  # learning_rate where Muon trains matrices, and where nothing else does
GOING_ON = 0.1  # the share of these rates at which `eagle31 train --drafter` goes on
TIMES_LONGER = 4  # position_reach over max_length, by default
UNBOUNDED = ("max_grad_norm",)  # may be infinite: that clips nothing, and the norm is logged all the same


def usual_rate(matrix_rate: float | None) -> float:
    """Returns `learning_rate` as it is where it is not given, for a `matrix_learning_rate`."""
    return RATE_ALONE if matrix_rate is None else RATE


def drafter_field(default: Any, about: str) -> Any:
    """Returns the field of an argument that only drafters have, with its help."""
    return field(default=default, metadata={"help": about})


@dataclass
class Eagle31TrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with defaults that suit drafters, and arguments that only drafters have; each of
    those has its help with it. Raises ValueError for values that cannot be.

    `learning_rate`: by default 0.004 where Muon trains the matrices, 0.0001 where `optim` trains everything. `depth`:
    steps unrolled; an EAGLE 3.1 drafter serves deeper than it was trained (arXiv 2605.09992, table of training depths).
    """

    learning_rate: float | None = None
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.02
    adam_beta2: float = 0.95
    per_device_train_batch_size: int = 1
    per_device_eval_batch_size: int = 1
    num_train_epochs: float = 2.0
    logging_steps: float = 10
    # it shows the mean of earlier losses instead, and waits for the device at every step
    logging_nan_inf_filter: bool = False
    remove_unused_columns: bool | None = False
    ddp_find_unused_parameters: bool | None = False
    ddp_timeout: int = 86_400  # seconds; while one process makes data the others wait

    matrix_learning_rate: float | None = drafter_field(
        MATRIX_RATE, "rate of Muon, which trains the matrices of fc and layers; None: `optim` trains all"
    )
    depth: int = drafter_field(4, f"steps the drafter is unrolled, 1 to {MAX_DEPTH}")
    depth_decay: float = drafter_field(0.8, "depth k weighs depth_decay ** k")
    depth_weights: list[float] | None = drafter_field(None, "a weight for each depth, instead of depth_decay")  # noqa: RUF009
    loss: str = drafter_field(DEFAULT_LOSS, "distance to the target, or a mixture of several")
    loss_mask: str = drafter_field(
        "serving", f"which chains are supervised where train_prompts is off: {', '.join(CONVENTIONS)}"
    )
    normalisation: str = drafter_field("token", f"what is averaged over: {', '.join(NORMALISATIONS)}")
    train_prompts: bool = drafter_field(
        True, "also learn from the tokens before and between answers; evaluations do not"
    )
    position_reach: int | None = drafter_field(
        None,
        "positions are spread up to so many by a skip in each text (PoSE), at most to the drafter's"
        f" max_position_embeddings; 0: not; by default {TIMES_LONGER} times max_length",
    )
    max_length: int = drafter_field(2048, "tokens of a packed sequence, at most")
    packing: bool = drafter_field(True, "several texts to a sequence, which do not see each other")
    train_embeddings: bool = drafter_field(False, "also train the drafter's own table, where it has one")
    train_head: bool = drafter_field(True, "also train the drafter's own head, where it has one")
    shard_target: bool = drafter_field(False, "each process keeps a part of every layer of the target (FSDP2)")
    eval_depth: int | None = drafter_field(None, "tokens drafted a round when evaluating, by default as many as depth")
    eval_prompts: int = drafter_field(4, "prompts that generate() decodes at an evaluation; 0: none")
    eval_max_new_tokens: int = drafter_field(64, "tokens of each")

    def __post_init__(self):
        self._check_kinds()
        chooses_best = self.load_best_model_at_end or SaveStrategy(self.save_strategy) == SaveStrategy.BEST
        if chooses_best and self.metric_for_best_model is None:
            self.metric_for_best_model, self.greater_is_better = BEST, True
        if self.learning_rate is None:
            self.learning_rate = usual_rate(self.matrix_learning_rate)
        if self.position_reach is None:
            self.position_reach = TIMES_LONGER * self.max_length
        super().__post_init__()
        self.check()

    def _check_kinds(self) -> None:
        """Raises ValueError for a field, of this class or of transformers', that should be a number and is none, and
        for one of this class that should be true or false and is neither. Numbers of other libraries become Python's.
        """
        own = Eagle31TrainingArguments.__annotations__
        for declared in fields(self):
            value, usual = getattr(self, declared.name), NUMBERS.get(declared.name, declared.default)
            if value is None and declared.name in NUMBERS:
                continue
            if own.get(declared.name) is bool and not isinstance(value, bool):
                raise ValueError(f"Eagle31TrainingArguments: {declared.name} is {value!r}; expected true or false.")
            if isinstance(usual, int | float) and not isinstance(usual, bool):
                kind: Any = Integral if isinstance(usual, int) else Real
                is_number = isinstance(value, kind) and not isinstance(value, bool) and value == value
                if not is_number or (abs(value) == inf and declared.name not in UNBOUNDED):
                    expected = "an integer" if kind is Integral else "a finite number"
                    expected += ", or None (null in JSON)" * (declared.name in NUMBERS)
                    raise ValueError(f"Eagle31TrainingArguments: {declared.name} is {value!r}; expected {expected}.")
                if type(value) not in (int, float):  # numpy's, which no JSON file takes
                    setattr(self, declared.name, int(value) if kind is Integral else float(value))

    def check(self) -> None:
        """Raises ValueError for values out of range and for values that contradict each other."""
        weights, rate = self.depth_weights, self.matrix_learning_rate
        masks, means = ", ".join(CONVENTIONS), ", ".join(NORMALISATIONS)
        rules = (
            (self.learning_rate >= 0, f"learning_rate is {self.learning_rate}; expected a rate of at least 0"),
            (rate is None or rate > 0, f"matrix_learning_rate is {rate}; expected a rate above 0, or None"),
            (1 <= self.depth <= MAX_DEPTH, f"depth is {self.depth}; expected 1 to {MAX_DEPTH}"),
            (
                weights is None
                or (len(weights) == self.depth and all(isinstance(each, Real) and 0 <= each < inf for each in weights)),
                f"depth_weights are {weights} and depth is {self.depth}; expected as many numbers of at least 0",
            ),
            (self.loss_mask in CONVENTIONS, f"loss_mask is {self.loss_mask!r}; expected one of {masks}"),
            (self.normalisation in NORMALISATIONS, f"normalisation is {self.normalisation!r}; expected one of {means}"),
            (self.position_reach >= 0, f"position_reach is {self.position_reach}; expected at least 0"),
            (self.max_length >= 4, f"max_length is {self.max_length}; expected at least 4"),
            (
                self.eval_depth is None or (type(self.eval_depth) is int and 1 <= self.eval_depth <= MAX_DEPTH),
                f"eval_depth is {self.eval_depth}; expected 1 to {MAX_DEPTH}",
            ),
            (
                self.label_smoothing_factor == 0,
                "label_smoothing_factor is set; expected 0, a drafter's labels are distributions",
            ),
            (
                not self.remove_unused_columns,
                "remove_unused_columns is set; expected False, the columns are a drafter's own",
            ),
        )
        for holds, message in rules:
            if not holds:
                raise ValueError(f"Eagle31TrainingArguments: {message}.")
        parse_mixture(self.loss)

    def settings(self) -> Settings:
        """Returns the settings of the loss that is minimised."""
        weights = self.depth_weights or self._decaying(self.depth)
        return Settings(self.depth, tuple(weights), parse_mixture(self.loss), self.loss_mask, self.normalisation)

    def eval_settings(self) -> Settings:
        """Returns the settings of an evaluation, however the drafter is trained: chains that serving can reach,
        averaged over tokens, `eval_depth` deep, positions as they are."""
        depth = self.eval_depth or self.depth
        weights = self.depth_weights if self.depth_weights and depth == self.depth else self._decaying(depth)
        return Settings(depth, tuple(weights), parse_mixture(self.loss))

    def _decaying(self, depth: int) -> list[float]:
        return [self.depth_decay**k for k in range(depth)]
