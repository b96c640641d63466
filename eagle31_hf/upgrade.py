"""An EAGLE 3 drafter made an EAGLE 3.1 one, without training: norms on the aux hidden states, and the post-norm state
fed back.

N positions of the calibration texts, n aux hidden states of width ht, h drafter width. Half of the positions are
fitted; the movements reported are those of the other half.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .acceptance import AcceptanceStats, by_position
from .configuration import FIELDS, Eagle31Config
from .diagnostics.acceptance import chain_knobs, measure_acceptance
from .modeling import Eagle31DrafterModel, refuse_parallel
from .quantized import refuse_quantized
from .targets.ends import execution_device, weight_of
from .targets.layers import decoder_layers, target_states
from .training.unroll import unroll

MAX_TOKENS = 4096  # of all calibration texts
MIN_TOKENS = 32
TEXT_TOKENS = 512  # longer texts are split
LEAST_TEXT = 4  # tokens
ITERATIONS = 60  # of the conjugate gradients
DEFAULT_DEPTH = 5
KEPT = 0.97  # share of the accepted length that must be left for an upgrade to be called good as it is
FITTED, HELD_OUT = slice(0, None, 2), slice(1, None, 2)  # positions


@dataclass(frozen=True)
class UpgradeReport:
    """Figures of an upgrade. Movements are mean relative distances, ||new - old|| / ||old||, at positions that nothing
    was fitted on.

    `fused_movement`: of the fused state, `fused_movement_scalar` with one number a state instead of a weight a channel;
    `feedback_movement`: of the state fed to the next step. `before` and `after`: acceptance of greedy texts after the
    same prompts.
    """

    fused_movement: float
    fused_movement_scalar: float
    feedback_movement: float
    before: AcceptanceStats
    after: AcceptanceStats

    @property
    def needs_fine_tuning(self) -> bool:
        """True where calibration alone lost more than a little of the accepted length."""
        return self.after.mean_accepted_length < KEPT * self.before.mean_accepted_length

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return vars(self) | {
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "needs_fine_tuning": self.needs_fine_tuning,
        }

    def summary(self) -> str:
        """Returns a few lines for people."""

        def line(name: str, stats: AcceptanceStats) -> str:
            rates = by_position(stats.acceptance_rates)
            return f"{name} accepted length {stats.mean_accepted_length:.2f}, by position {rates}"

        advice = (
            "fine-tune it: calibration alone lost acceptance"
            if self.needs_fine_tuning
            else "usable as it is; fine-tuning is what teaches it to draft deeper"
        )
        moved = (
            f"fused state moved by {self.fused_movement:.1%} (one scale a state: {self.fused_movement_scalar:.1%}),"
            f" fed-back state by {self.feedback_movement:.1%}"
        )
        return "\n".join((moved, line("before:", self.before), line("after: ", self.after), advice))


@torch.no_grad()
def upgrade_to_eagle31(
    drafter: Eagle31DrafterModel,
    target: PreTrainedModel,
    texts: Sequence[str] | Sequence[Tensor],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_assistant_tokens: int | None = None,
    num_prompts: int = 8,
    max_new_tokens: int = 64,
) -> Eagle31DrafterModel:
    """Returns a copy of an EAGLE 3 drafter with `fc_norm` and `norm_output`; `drafter` itself is left as it is.

    The norms' weights minimise how far the fused state moves on `texts` (strings, or token ids (1, T)): least squares,
    every position relative to its own size. `norm` is rescaled to give fed-back states the size they had, and the head
    rescaled back, so that logits of a given state stay. `upgraded.upgrade_report` has movements, and acceptance before
    and after, measured on greedy texts of `max_new_tokens` after the first half of up to `num_prompts` texts. Strings
    need a `tokenizer`, by default the target's own. Raises ValueError for a drafter that is EAGLE 3.1 already, and for
    too little text.
    """
    refuse_parallel(drafter, "upgraded")
    if drafter.config.is_eagle31:
        raise ValueError(
            "the drafter is EAGLE 3.1 already (fc_norm and norm_output are on); expected an EAGLE 3 drafter."
        )
    refuse_quantized(drafter, "upgraded")
    texts = _calibration_texts(texts, target, tokenizer)
    drafter.load_target_embeddings(target)
    layer_ids = drafter.config.resolve_layer_ids(len(decoder_layers(target)))
    captured = [target_states(target, ids, layer_ids)[0] for ids in texts]
    upgraded = _with_new_modules(drafter)
    upgraded.load_target_embeddings(target)
    scalar, fused = _fit_fc_norm(drafter, upgraded, torch.cat([states[0] for states in captured]))
    feedback = 0.0 if drafter.config.norm_output else _fit_norm_output(drafter, upgraded, texts, captured)
    prompts = [ids[:, : max(1, ids.shape[1] // 2)] for ids in texts[:num_prompts]]
    own = drafter.generation_config.num_assistant_tokens
    # auto has no one depth to be compared at
    depth = num_assistant_tokens or (own if isinstance(own, int) else DEFAULT_DEPTH)
    before, after = (
        measure_acceptance(target, model, prompts, chain_knobs(depth), max_new_tokens) for model in (drafter, upgraded)
    )
    upgraded.upgrade_report = UpgradeReport(fused, scalar, feedback, before, after)
    _note_on_card(upgraded, sum(ids.shape[1] for ids in texts), len(prompts), depth)
    return upgraded


def _note_on_card(upgraded: Eagle31DrafterModel, num_tokens: int, num_prompts: int, depth: int) -> None:
    """Adds to the facts of the model card how the drafter was upgraded, and the acceptance `depth` deep before and
    after."""
    report, facts = upgraded.upgrade_report, upgraded.card_facts
    for name, stats in (("before the upgrade", report.before), ("after it", report.after)):
        facts.acceptance.append({"data": f"{num_prompts} calibration texts, {name}", "depth": depth, **stats.as_dict()})
    facts.training["Upgrade"] = (
        f"from EAGLE 3 by calibration on {num_tokens:,} tokens; the fused state moved by {report.fused_movement:.1%}, "
        f"the fed-back state by {report.feedback_movement:.1%}"
    )


def _calibration_texts(
    texts: Sequence[str] | Sequence[Tensor], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> list[Tensor]:
    """Returns the texts as token ids (1, T) of LEAST_TEXT to TEXT_TOKENS tokens, about MAX_TOKENS in all."""
    from transformers import AutoTokenizer  # not part of importing the library

    kept, total = list[Tensor](), 0
    for text in texts:
        if isinstance(text, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(target.name_or_path)
            text = tokenizer(text, return_tensors="pt")["input_ids"]
        if not isinstance(text, Tensor) or text.dim() != 2 or text.shape[0] != 1:
            raise ValueError(f"texts hold a {type(text).__name__}; expected strings or token ids of shape (1, T).")
        for piece in text.to(execution_device(target)).split(TEXT_TOKENS, dim=1):
            if piece.shape[1] >= LEAST_TEXT and total < MAX_TOKENS:
                kept.append(piece)
                total += piece.shape[1]
    if total < MIN_TOKENS:
        raise ValueError(
            f"texts hold {total} tokens in rows of at least {LEAST_TEXT}; expected {MIN_TOKENS} or more, better some"
            " thousands."
        )
    return kept


def _with_new_modules(drafter: Eagle31DrafterModel) -> Eagle31DrafterModel:
    """Returns a copy of the drafter with the modules that EAGLE 3.1 adds, whose weights are still to be fitted."""
    fields = {name: getattr(drafter.config, name) for name in FIELDS}
    fields |= {"fc_norm": True, "norm_output": True, "norm_before_fc": False, "share_target_head": False}
    config = Eagle31Config(**fields)
    config.dtype, config._attn_implementation = drafter.config.dtype, drafter.config._attn_implementation
    upgraded: Any = Eagle31DrafterModel(config)
    upgraded = upgraded.to(drafter.like).eval()
    missing, unexpected = upgraded.load_state_dict(drafter.state_dict(), strict=False)
    assert all(name.startswith("fc_norm.") or name == "lm_head.weight" for name in missing), missing
    assert all(name.startswith("input_norm.") for name in unexpected), unexpected
    if "lm_head.weight" in missing:
        upgraded.lm_head.weight.copy_(weight_of(drafter.get_output_embeddings(), "head"))
    upgraded.generation_config, upgraded.card_facts = deepcopy(drafter.generation_config), deepcopy(drafter.card_facts)
    return upgraded


def _fit_fc_norm(drafter: Eagle31DrafterModel, upgraded: Eagle31DrafterModel, states: Tensor) -> tuple[float, float]:
    """Sets `fc_norm` from aux hidden states (N, n*ht); returns the movement with one scale a state, and with the
    weights that are set.

    Conjugate gradients on the normal equations of sum_t |W (w * u_t) - f_t|^2 / |f_t|^2, u the normed states, f the old
    fused state, from the best scales on; the iterate that moves the held-out positions least is kept.
    """
    n, width = drafter.config.num_aux_states, drafter.config.target_hidden_size
    weight = drafter.fc.weight.float()
    states = states.to(weight)
    pieces = states.split(TEXT_TOKENS)
    fused = torch.cat([drafter.fuse_target_states(piece.to(drafter.norm.weight)[None])[0].float() for piece in pieces])
    parts = states.unflatten(1, (n, width))
    normed = (parts * (parts.pow(2).mean(-1, keepdim=True) + drafter.config.rms_norm_eps).rsqrt()).flatten(1)
    size = fused.norm(dim=1, keepdim=True).clamp(min=1e-12)
    bias = 0.0 if drafter.fc.bias is None else drafter.fc.bias.float()
    normed, fused = normed / size, (fused - bias) / size  # so that all positions weigh alike

    def movement(w: Tensor) -> float:
        return ((normed[HELD_OUT] * w) @ weight.T - fused[HELD_OUT]).norm(dim=1).mean().item()

    parts = zip(normed[FITTED].split(width, 1), weight.split(width, 1), strict=True)
    contributions = torch.stack([part @ block.T for part, block in parts], -1)
    scales = torch.linalg.lstsq(
        contributions.flatten(0, 1).cpu().double(), fused[FITTED].reshape(-1, 1).cpu().double()
    ).solution.to(weight)
    w = scales.expand(n, width).reshape(-1).clone()
    scalar = movement(w)
    best = _conjugate_gradients(normed[FITTED], fused[FITTED], weight, w, movement)
    for norm, values in zip(upgraded.fc_norm, best.split(width), strict=True):
        norm.weight.copy_(values)
    return scalar, movement(torch.cat([norm.weight.float() for norm in upgraded.fc_norm]))


def _conjugate_gradients(
    u: Tensor, wanted: Tensor, weight: Tensor, w: Tensor, movement: Callable[[Tensor], float]
) -> Tensor:
    """Minimises |weight (w * u) - wanted|^2 from `w` (n*ht,) on, preconditioned by the diagonal; returns the iterate of
    least `movement`."""
    diagonal = (u.pow(2).sum(0) * weight.pow(2).sum(0)).clamp(min=1e-20)
    best, least = w.clone(), movement(w)
    residual = (u * ((wanted - (u * w) @ weight.T) @ weight)).sum(0)
    z = residual / diagonal
    direction, rho = z.clone(), residual @ z
    for _ in range(ITERATIONS):
        image = (u * (((u * direction) @ weight.T) @ weight)).sum(0)
        step = rho / (direction @ image).clamp(min=1e-30)
        w = w + step * direction
        residual = residual - step * image
        moved = movement(w)
        if moved < least:
            best, least = w.clone(), moved
        z = residual / diagonal
        rho, previous = residual @ z, rho
        direction = z + (rho / previous.clamp(min=1e-30)) * direction
    return best


def _fit_norm_output(
    drafter: Eagle31DrafterModel, upgraded: Eagle31DrafterModel, texts: list[Tensor], captured: list[Tensor]
) -> float:
    """Sets `norm` so that the post-norm state is as near to the pre-norm one as can be, and the head so that logits
    stay; returns the movement at held-out positions.

    With x the state, r its root mean square and v the weight, v * x / r against x: least squares for each channel,
    every position relative to its own size.
    """
    depth = max(1, min(DEFAULT_DEPTH, min(ids.shape[1] for ids in texts) - 2))
    states = []
    for ids, target_state in zip(texts, captured, strict=True):
        ids = ids.to(drafter.fc.weight.device)
        states += [state[0].float() for _, state in unroll(drafter, ids, target_state.to(ids.device), depth)]
    x = torch.cat(states)
    unit = x * (x.pow(2).mean(-1, keepdim=True) + drafter.config.rms_norm_eps).rsqrt()
    weights = x.norm(dim=1, keepdim=True).clamp(min=1e-12).pow(-2)
    scale = (weights * unit * x)[FITTED].sum(0) / (weights * unit.pow(2))[FITTED].sum(0).clamp(min=1e-20)
    scale = torch.where(scale > 0, scale, 1.0)  # of a channel that is 0 in all states, nothing follows
    old = upgraded.norm.weight.float()
    head = upgraded.lm_head.weight.float() * (old / scale)
    upgraded.norm.weight.copy_(scale)
    upgraded.lm_head.weight.copy_(head)
    distance = (unit[HELD_OUT] * scale - x[HELD_OUT]).norm(dim=1)
    return (distance / x[HELD_OUT].norm(dim=1).clamp(min=1e-12)).mean().item()
