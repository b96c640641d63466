"""Trains one drafter by one recipe, and measures what would be accepted of its drafts: a part of `search_recipe.py`.

N predictions, h width, K depths.
"""

import math
import tempfile
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from search_fit import START
from search_material import BATCH, SHAPES, Material
from search_table import SETS
from torch import Tensor

from eagle31_hf import Eagle31DrafterModel, Eagle31Trainer, Eagle31TrainingArguments
from eagle31_hf.training.documents import position_skips, reach_within
from eagle31_hf.training.evaluation import Evaluation, walk_metrics
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.losses import parse_mixture
from eagle31_hf.training.objective import Batch, DraftingObjective, Settings, means_of
from eagle31_hf.training.optimizer import ADJUSTMENT, MOMENTUM, matrices_of

SERVED_DEPTH = 7
EVALUATED_AT_ONCE = {"as trained": 16, "perturbed": 16, "long": 4}
EAGLE3 = {"fc_norm": False, "norm_output": False}


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained. Each field is a switch of its own.

    `rate` is AdamW's, `matrix_rate` Muon's, which trains the matrices unless it is None; `adjust`, `momentum`: Muon's.
    `clip`: the largest norm of the gradient. `schedule`, `warm_up` (steps): see `rate_factor`. `depth` K, and its k-th
    step weighs `depth_decay` ** k, or with `reach` the share of drafts that get there. `loss_after` takes the place of
    `loss` after a third of the steps. `jump`: see `position_skips`.
    `ema`: decay of the average of weights that is served. `texts`: see `Material.training_texts`; with `all_tokens`
    their prompts are learnt, too; `joined`: how many lie end to end, see `joined`. `start`: see `search_fit.START`.
    `layers`: see `layer_ids_of`. `head`: it is trained.
    `parallel`: see `ParallelDrafts`. `fields` of `Eagle31Config` win. `library`: `trained_by_the_library` trains, by
    `rate`, `matrix_rate`, `weight_decay` and `fields` of all these switches, and by `batch`, its texts of a step: at
    most BATCH or a multiple of it.
    """

    rate: float = 1e-3
    matrix_rate: float | None = None
    adjust: str = ADJUSTMENT
    momentum: float = MOMENTUM
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip: float = 1.0
    schedule: str = "cosine"
    warm_up: int = 50
    depth: int = 3
    depth_decay: float = 1.0
    reach: bool = False
    loss: str = "kl"
    loss_after: str | None = None
    start: str = "noise"
    layers: str = "default"
    texts: str = "greedy"
    all_tokens: bool = False
    jump: int = 0
    joined: int = 1
    ema: float = 0.0
    head: bool = False
    autocast: bool = False
    parallel: bool = False
    batch: int = BATCH
    library: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


def layer_ids_of(recipe: Recipe, material: Material) -> list[int]:
    """Returns the layers a recipe captures: the default ones, four, late ones, or given ones as in `4-12-23`."""
    if recipe.layers == "default":
        return material.default_layers()
    depth = material.target.config.num_hidden_layers
    if recipe.layers == "four":
        return [2, depth // 3, 2 * depth // 3, depth - 1]
    if recipe.layers == "late":
        return [depth // 2, depth - 2, depth - 1]
    return [int(layer) for layer in recipe.layers.split("-")]


def new_optimizers(drafter: Eagle31DrafterModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Makes the optimizers of all that is trained."""
    matrices = [] if recipe.matrix_rate is None else matrices_of(drafter)
    chosen = set(map(id, matrices))
    rest = [p for p in drafter.parameters() if p.requires_grad and id(p) not in chosen]
    decays = [
        {"params": [p for p in rest if p.dim() > 1]},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(decays, lr=recipe.rate, betas=(0.9, recipe.beta2), weight_decay=recipe.weight_decay)
    ]
    if matrices:
        options = {"lr": recipe.matrix_rate, "weight_decay": recipe.weight_decay, "momentum": recipe.momentum}
        found.append(torch.optim.Muon(matrices, adjust_lr_fn=recipe.adjust, **options))
    return found


def rate_factor(recipe: Recipe, step: int, steps: int) -> float:
    """Returns what the rates are multiplied by."""
    progress = step / steps
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": min(1.0, (1 - progress) / 0.4),
        "constant": 1.0,
    }[recipe.schedule]
    return min(1.0, (step + 1) / max(1, recipe.warm_up)) * shape


class SearchObjective(DraftingObjective):
    """The library's objective, and what recipes add to it. `progress` is the share of training that is done."""

    def __init__(self, drafter: Eagle31DrafterModel, recipe: Recipe, logits_of: Any):
        weights = tuple(recipe.depth_decay**k for k in range(recipe.depth))
        settings = Settings(recipe.depth, weights, parse_mixture(recipe.loss))
        super().__init__(drafter, settings, logits_of)
        self.recipe = recipe
        self.reached = torch.ones(recipe.depth)  # running mean of the acceptance at each depth
        self.begin(0.0)

    def begin(self, progress: float) -> None:
        """Sets what depends on the progress."""
        recipe = self.recipe
        if recipe.loss_after and progress >= 1 / 3:
            self.settings = replace(self.settings, mixture=parse_mixture(recipe.loss_after))
        if recipe.reach:
            before = torch.cat([torch.ones(1), self.reached[:-1]]).cumprod(0)
            self.settings = replace(self.settings, depth_weights=tuple(before.tolist()))

    def end(self, sums: Tensor) -> None:
        """Takes the figures of a step."""
        acceptance = torch.tensor(means_of(sums)["acceptance"])
        self.reached = 0.9 * self.reached + 0.1 * acceptance.float()


class ParallelDrafts:
    """Lets a drafter draft all depths as parallel heads do from one forward: after depth 0 it reads, in place of the
    token drafted before and of its own state, one token (0, which begins texts) and one state that is learnt."""

    def __init__(self, drafter: Eagle31DrafterModel):
        drafter.register_parameter("later_state", torch.nn.Parameter(torch.zeros(drafter.config.hidden_size)))
        drafter.register_forward_pre_hook(self._mask, with_kwargs=True)

    def _mask(self, drafter: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        state = kwargs.get("hidden_states")
        if state is None:
            return args, kwargs
        return (torch.zeros_like(args[0]), *args[1:]), kwargs | {"hidden_states": drafter.later_state.expand_as(state)}


def joined(batch: Batch, count: int) -> Batch:
    """Lays every `count` texts of a batch end to end, in sight of each other as if they were one. No chain goes on from
    one to the next, since the first token of a text is no answer."""
    ids, answers = batch.input_ids, batch.answers.clone()
    answers[:, 0] = False
    columns = (ids, answers, batch.documents, batch.states, batch.last_states)
    shape = (len(ids) // count, count * ids.shape[1])
    return Batch(*(column.reshape(*shape, *column.shape[2:]) for column in columns))


class Average:
    """An exponential moving average of weights, short while there are few of them."""

    def __init__(self, drafter: Eagle31DrafterModel, decay: float):
        self.drafter, self.decay, self.count = drafter, decay, 0
        self.weights = [p.detach().clone() for p in drafter.parameters()]

    def add(self) -> None:
        self.count += 1
        decay = min(self.decay, self.count / (self.count + 10))
        torch._foreach_lerp_(self.weights, [p.detach() for p in self.drafter.parameters()], 1 - decay)

    @torch.no_grad()
    def serve(self) -> None:
        """Gives the drafter the averaged weights."""
        for p, weight in zip(self.drafter.parameters(), self.weights, strict=True):
            p.copy_(weight)


def begun(material: Material, recipe: Recipe, seed: int) -> Eagle31DrafterModel:
    """Makes the drafter that a recipe begins with."""
    fields = {"aux_hidden_state_layer_ids": layer_ids_of(recipe, material)} | SHAPES[material.name] | recipe.fields
    drafter = new_drafter(material.target, seed=seed, **fields)
    if recipe.parallel:
        ParallelDrafts(drafter)
    if drafter.lm_head is not None:
        drafter.lm_head.requires_grad_(recipe.head)
    START[recipe.start](drafter, material, recipe.texts)
    return drafter.train()


def trained(material: Material, recipe: Recipe, seed: int, steps: int) -> tuple[Eagle31DrafterModel, dict[str, float]]:
    """Trains a drafter; returns it, the processor's seconds of a step, and a running mean of the losses."""
    if recipe.library:
        return trained_by_the_library(material, begun(material, recipe, seed), recipe, seed, steps)
    layer_ids = layer_ids_of(recipe, material)
    texts, drafter = material.training_texts(recipe.texts, layer_ids), begun(material, recipe, seed)
    objective = SearchObjective(drafter, recipe, material.reader(layer_ids).logits)
    optimizers = new_optimizers(drafter, recipe)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    average = Average(drafter, recipe.ema) if recipe.ema else None
    torch.manual_seed(seed)
    draw, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    loss, began = 0.0, time.process_time()
    for step in range(steps):
        if len(order) < BATCH:
            order = torch.cat([order, torch.randperm(len(texts.ids), generator=draw)])
        batch, order = joined(texts.batch(order[:BATCH], recipe.all_tokens), recipe.joined), order[BATCH:]
        set_rates(optimizers, peaks, rate_factor(recipe, step, steps))
        found = training_step(objective, optimizers, batch, step / steps)
        loss = loss + 0.05 * (found - loss) if step else found
        if average:
            average.add()
        if step % 60 == 0:
            print(f"  step {step} loss {loss:.3f}", flush=True)
    seconds = (time.process_time() - began) / steps
    if average:
        average.serve()
    return drafter.eval(), {"seconds": seconds, "loss": loss}


def trained_by_the_library(
    material: Material, drafter: Eagle31DrafterModel, recipe: Recipe, seed: int, steps: int
) -> tuple[Eagle31DrafterModel, dict[str, float]]:
    """Trains a drafter as `eagle31 train --bf16` does, by `Eagle31Trainer` and its defaults, with rows of at most BATCH
    texts; returns what `trained` does, but the seconds include the target's forwards, and the loss is the last."""
    texts = material.training_texts(recipe.texts, drafter.config.aux_hidden_state_layer_ids)
    answers = torch.arange(texts.ids.shape[1]) >= texts.prompt
    with tempfile.TemporaryDirectory() as folder:
        args = Eagle31TrainingArguments(
            folder,
            max_steps=steps,
            max_length=min(recipe.batch, BATCH) * texts.ids.shape[1],
            gradient_accumulation_steps=max(1, recipe.batch // BATCH),
            learning_rate=recipe.rate,
            matrix_learning_rate=recipe.matrix_rate,
            weight_decay=recipe.weight_decay,
            bf16=True,
            seed=seed,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=min(60, steps),
        )
        examples = [{"input_ids": ids, "answers": answers} for ids in texts.ids]
        trainer = Eagle31Trainer(drafter, args, examples, target=material.target)
        began = time.process_time()
        trainer.train()
    seconds = (time.process_time() - began) / steps
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return drafter.float().eval(), {"seconds": seconds, "loss": losses[-1]}


def set_rates(optimizers: list[torch.optim.Optimizer], peaks: list[list[float]], factor: float) -> None:
    for optimizer, of_groups in zip(optimizers, peaks, strict=True):
        for group, peak in zip(optimizer.param_groups, of_groups, strict=True):
            group["lr"] = peak * factor


def training_step(
    objective: SearchObjective, optimizers: list[torch.optim.Optimizer], batch: Batch, progress: float
) -> float:
    """Takes one step, and returns its loss."""
    objective.begin(progress)
    if objective.recipe.jump:
        reach = reach_within(objective.drafter.config, objective.recipe.jump, objective.recipe.depth)
        batch.skips = position_skips(batch.documents, reach)
    with torch.autocast("cpu", torch.bfloat16, enabled=objective.recipe.autocast):
        outputs = objective(batch)
    outputs["loss"].backward()
    torch.nn.utils.clip_grad_norm_(
        [p for p in objective.drafter.parameters() if p.requires_grad], objective.recipe.clip
    )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    objective.end(outputs["sums"])
    return outputs["loss"].item()


@torch.no_grad()
def measured(material: Material, drafter: Eagle31DrafterModel) -> dict[str, Any]:
    """Returns the accepted length (bonus included) of every set of prompts at K = 7, greedy, as `generate` would find
    it, and of the first the teacher-forced accuracy by depth, and acceptance by sampling at temperature 1."""
    settings = Settings(SERVED_DEPTH, (1.0,) * SERVED_DEPTH)
    layer_ids = drafter.config.aux_hidden_state_layer_ids
    objective = DraftingObjective(drafter, settings, material.reader(layer_ids).logits).eval()
    objective.watches = True
    found: dict[str, Any] = {}
    for name, texts in material.prompt_sets(layer_ids).items():
        evaluation = Evaluation(settings, drafter.draft_to_target_ids(), set())
        for which in torch.arange(len(texts.ids)).split(EVALUATED_AT_ONCE[name]):
            batch = texts.batch(which)
            evaluation.add(batch, objective(batch))
        found[name] = walk_metrics(evaluation.walked)["accepted_length"]
        if name == SETS[0]:
            means = means_of(evaluation.sums)
            found |= {figure: [round(value, 4) for value in means[figure]] for figure in ("accuracy", "acceptance")}
    return found
