"""An EAGLE 3 drafter made an EAGLE 3.1 one, without training: norms on the captured states, and the post-norm state fed
back.

N rows (positions), n captured states of width ht, h drafter width. What is fitted is fitted on half of the rows;
movements reported are those of the other half.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .configuration import Eagle31Config
from .diagnostics.acceptance import AcceptanceStats, measure_acceptance
from .modeling import Eagle31DrafterModel
from .targets.ends import execution_device, weight_of
from .targets.layers import decoder_layers, target_states
from .training.unroll import unroll

MAX_ROWS = 4096
MIN_ROWS = 32
ROW_TOKENS = 512
ITERATIONS = 60
DEFAULT_DEPTH = 5
KEPT = 0.97  # share of the accepted length that must be left for an upgrade to be called good as it is


@dataclass(frozen=True)
class UpgradeReport:
    """What an upgrade did. Movements are mean relative distances, ||new - old|| / ||old||, on rows that nothing was
    fitted on.

    `fused_movement`: of the fused state, `fused_movement_scalar` with one number a state instead of a weight a channel;
    `feedback_movement`: of the state fed to the next step. `before` and `after`: acceptance of greedy texts on the same
    prompts.
    """

    fused_movement: float
    fused_movement_scalar: float
    feedback_movement: float
    before: AcceptanceStats
    after: AcceptanceStats

    @property
    def needs_fine_tuning(self) -> bool:
        return self.after.mean_accepted_length < KEPT * self.before.mean_accepted_length

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        moved = {name: getattr(self, name) for name in ("fused_movement", "fused_movement_scalar", "feedback_movement")}
        return moved | {
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "needs_fine_tuning": self.needs_fine_tuning,
        }

    def summary(self) -> str:
        def row(name: str, stats: AcceptanceStats) -> str:
            rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rates)
            return f"{name} accepted length {stats.mean_accepted_length:.2f}, by position {rates}"

        advice = (
            "fine-tune it: calibration alone lost acceptance"
            if self.needs_fine_tuning
            else "usable as it is; fine-tuning is what teaches it to draft deeper"
        )
        return "\n".join(
            (
                (
                    f"fused state moved by {self.fused_movement:.1%} (one scale a state:"
                    f" {self.fused_movement_scalar:.1%}), fed-back state by {self.feedback_movement:.1%}"
                ),
                row("before:", self.before),
                row("after: ", self.after),
                advice,
            )
        )


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
    """A copy of an EAGLE 3 drafter with `fc_norm` and `norm_output`; `drafter` itself is left as it is.

    The norms' weights minimise how far the fused state moves on `texts` (strings, or token ids (1, T)): least squares,
    each row relative to its own size. `norm` is rescaled to give fed-back states the size they had, and the head
    rescaled back, so that logits of a given state stay. `upgraded.upgrade_report` has movements and acceptance before
    and after, measured on greedy texts of `max_new_tokens` after the first half of up to `num_prompts` texts. Strings
    need a `tokenizer`, by default the target's own. Raises ValueError for a drafter that is EAGLE 3.1 already, and for
    too little text.
    """
    if drafter.config.is_eagle31:
        raise ValueError(
            "the drafter is EAGLE 3.1 already (fc_norm and norm_output are on); expected an EAGLE 3 drafter."
        )
    rows = _token_rows(texts, target, tokenizer)
    drafter.load_target_embeddings(target)
    layer_ids = drafter.config.resolve_layer_ids(len(decoder_layers(target)))
    captured = [target_states(target, ids, layer_ids)[0] for ids in rows]
    upgraded = _with_new_modules(drafter)
    upgraded.load_target_embeddings(target)
    scalar, fused = _fit_fc_norm(drafter, upgraded, torch.cat([states[0] for states in captured]))
    feedback = 0.0 if drafter.config.norm_output else _fit_norm_output(drafter, upgraded, rows, captured)
    prompts = [ids[:, : max(1, ids.shape[1] // 2)] for ids in rows[:num_prompts]]
    own = drafter.generation_config.num_assistant_tokens
    # auto has no one depth to be compared at
    depth = num_assistant_tokens or (own if isinstance(own, int) else DEFAULT_DEPTH)
    before, after = (measure_acceptance(target, model, prompts, depth, max_new_tokens) for model in (drafter, upgraded))
    upgraded.upgrade_report = UpgradeReport(fused, scalar, feedback, before, after)
    _note_on_card(upgraded, sum(ids.shape[1] for ids in rows), len(prompts), depth)
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


def _token_rows(
    texts: Sequence[str] | Sequence[Tensor], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> list[Tensor]:
    """Token ids (1, T), T <= 512, of at most 4,096 tokens in all."""
    from transformers import AutoTokenizer  # not part of importing the library

    rows: list[Tensor] = []
    for text in texts:
        if isinstance(text, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(target.name_or_path)
            text = tokenizer(text, return_tensors="pt")["input_ids"]
        if not isinstance(text, Tensor) or text.dim() != 2 or text.shape[0] != 1:
            raise ValueError(f"texts hold a {type(text).__name__}; expected strings or token ids of shape (1, T).")
        rows += [row for row in text.to(execution_device(target)).split(ROW_TOKENS, dim=1) if row.shape[1] >= 4]
    kept, total = [], 0
    for row in rows:
        if total < MAX_ROWS:
            kept.append(row)
            total += row.shape[1]
    if total < MIN_ROWS:
        raise ValueError(
            f"texts hold {total} tokens in rows of at least 4; expected {MIN_ROWS} or more, better some thousands."
        )
    return kept


def _with_new_modules(drafter: Eagle31DrafterModel) -> Eagle31DrafterModel:
    """The same drafter with the modules EAGLE 3.1 has besides; their weights are still to be fitted."""
    fields = {name: getattr(drafter.config, name) for name in Eagle31Config.__annotations__}
    config = Eagle31Config(
        **fields | {"fc_norm": True, "norm_output": True, "norm_before_fc": False, "share_target_head": False}
    )
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
    """Sets `fc_norm` from captured states (N, n*ht); the movement with one scale a state, and with the weights set.

    Conjugate gradients on the normal equations of sum_t |W (w * u_t) - g_t|^2 / |g_t|^2, u the normed states, g the old
    fused state, from the best scales on; the iterate that moves the held-out rows least is kept.
    """
    n, width = drafter.config.num_aux_states, drafter.config.target_hidden_size
    states = states.to(drafter.fc.weight.device, torch.float32)
    weight = drafter.fc.weight.float()
    fused = torch.cat(
        [drafter.fuse_target_states(part.to(drafter.norm.weight)[None])[0].float() for part in states.split(ROW_TOKENS)]
    )
    parts = states.unflatten(1, (n, width))
    normed = (parts * (parts.pow(2).mean(-1, keepdim=True) + drafter.config.rms_norm_eps).rsqrt()).flatten(1)
    bias = 0.0 if drafter.fc.bias is None else drafter.fc.bias.float()
    size = fused.norm(dim=1, keepdim=True).clamp(min=1e-12)
    u, goal = normed / size, (fused - bias) / size  # rows weigh alike
    fit, check = slice(0, None, 2), slice(1, None, 2)

    def movement(w: Tensor) -> float:
        return ((u[check] * w) @ weight.T - goal[check]).norm(dim=1).mean().item()

    contributions = torch.stack(
        [part @ block.T for part, block in zip(u[fit].split(width, 1), weight.split(width, 1), strict=True)], -1
    )
    scales = torch.linalg.lstsq(
        contributions.flatten(0, 1).double(), goal[fit].reshape(-1, 1).double()
    ).solution.float()
    w = scales.expand(n, width).reshape(-1).clone()
    scalar = movement(w)
    best = _conjugate_gradients(u[fit], goal[fit], weight, w, movement)
    for norm, values in zip(upgraded.fc_norm, best.split(width), strict=True):
        norm.weight.copy_(values)
    return scalar, movement(torch.cat([norm.weight.float() for norm in upgraded.fc_norm]))


def _conjugate_gradients(u: Tensor, goal: Tensor, weight: Tensor, w: Tensor, movement) -> Tensor:
    """The iterate of least `movement`, from `w` (n*ht,) on; preconditioned by the diagonal."""
    diagonal = (u.pow(2).sum(0) * weight.pow(2).sum(0)).clamp(min=1e-20)
    best, least = w.clone(), movement(w)
    residual = (u * ((goal - (u * w) @ weight.T) @ weight)).sum(0)
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
    drafter: Eagle31DrafterModel, upgraded: Eagle31DrafterModel, rows: list[Tensor], captured: list[Tensor]
) -> float:
    """Sets `norm` so that the post-norm state is as near to the pre-norm one as can be, and the head so that logits
    stay.

    With x the state, r its root mean square and v the weight, v * x / r against x: least squares for each channel, rows
    relative to their own size. Returns the movement of held-out rows.
    """
    depth = max(1, min(5, min(ids.shape[1] for ids in rows) - 2))
    states = []
    for ids, target_state in zip(rows, captured, strict=True):
        ids = ids.to(drafter.fc.weight.device)
        states += [state[0].float() for _, state in unroll(drafter, ids, target_state.to(ids.device), depth)]
    x = torch.cat(states)
    unit = x * (x.pow(2).mean(-1, keepdim=True) + drafter.config.rms_norm_eps).rsqrt()
    share = x.norm(dim=1, keepdim=True).clamp(min=1e-12).pow(-2)
    fit, check = slice(0, None, 2), slice(1, None, 2)
    scale = (share * unit * x)[fit].sum(0) / (share * unit.pow(2))[fit].sum(0).clamp(min=1e-20)
    old = upgraded.norm.weight.float()
    head = upgraded.lm_head.weight.float() * (old / scale)
    upgraded.norm.weight.copy_(scale)
    upgraded.lm_head.weight.copy_(head)
    return ((unit[check] * scale - x[check]).norm(dim=1) / x[check].norm(dim=1).clamp(min=1e-12)).mean().item()
