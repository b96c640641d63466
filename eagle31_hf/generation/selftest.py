"""Whether a target can verify trees: tried once for every target class and attention implementation, on a few random tokens."""

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from ..tying import execution_device
from .target import slot_masks
from .tree import DraftTree

logger = logging.get_logger(__name__)

PREFIX = 6
PARENTS = (-1, 0, 0, 1, 2, 3)  # two branches that go on
# Shares of the logits' spread. In fp32 right targets are off by 3e-6 at most, wrong ones by 0.06 and more; in bf16 rounding adds up.
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 0.05

HIDDEN = (
    "its forward's signature hides position_ids, or prepare_inputs_for_generation drops them (functools.wraps keeps the signature of a "
    "forward)"
)

# Verdicts outlive the calls that needed them: (class, implementation, dtype, config, positions) -> why not. Filled by equal values only.
_verdicts: dict[tuple, str | None] = {}


def why_no_trees(target: PreTrainedModel, is_told_positions: bool = True) -> str | None:
    """None where trees are verified as sequences would be, else the reason, logged the first time it is found.

    `is_told_positions`: whether `generate` hands positions to its forward; one that a user has wrapped may hide that it takes them.
    """
    config = target.config.get_text_config(decoder=True)
    implementation = str(target.config._attn_implementation)
    kinds = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
    key = (type(target), implementation, target.dtype, config.to_json_string(use_diff=False), is_told_positions)
    if key not in _verdicts:
        _verdicts[key] = _try(target, implementation, set(kinds)) or (None if is_told_positions else HIDDEN)
        if _verdicts[key]:
            logger.warning("EAGLE drafting: chains instead of trees for %s: %s.", type(target).__name__, _verdicts[key])
    return _verdicts[key]


def _try(target: PreTrainedModel, implementation: str, kinds: set[str]) -> str | None:
    if implementation not in ("eager", "sdpa"):
        return f"attention implementation {implementation} takes no mask of a tree"
    if kinds - {"full_attention", "sliding_attention"}:
        return f"layers of type {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))}"
    config = target.config.get_text_config(decoder=True)
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "its windows go by row of the cache, not by position"  # GPT-Neo; seen only past the window
    try:
        error = _error(target)
    except torch.OutOfMemoryError:  # says nothing about the target
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as failure:
        return f"its forward refuses a tree ({type(failure).__name__}: {str(failure).splitlines()[0][:100]})"
    tolerance = TOLERANCE if target.dtype == torch.float32 else LOW_PRECISION_TOLERANCE
    return None if error <= tolerance else f"its logits over a tree differ from those over its paths ({error:.2f} of their spread)"


@torch.no_grad()
def _error(target: PreTrainedModel) -> float:
    """The largest difference of logits between a tree and its paths taken one by one, in units of the logits' standard deviation."""
    config = target.config.get_text_config(decoder=True)
    device = execution_device(target.get_input_embeddings())
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, config.vocab_size, (PREFIX + len(PARENTS),), generator=generator).to(device)
    prefix, nodes = draw[:PREFIX], draw[PREFIX:]
    tree = DraftTree.from_parents(nodes[None], torch.tensor([PARENTS], device=device), max_depth=len(PARENTS))
    cache = DynamicCache(config=config)
    target(input_ids=prefix[None], past_key_values=cache, use_cache=True)
    cache.crop(0)
    out = target(
        input_ids=nodes[None], position_ids=PREFIX + tree.depths, past_key_values=cache, use_cache=True,
        attention_mask=slot_masks(target, cache, [PREFIX], tree.ancestors, tree.depths),
    )  # fmt: skip
    reference = torch.zeros_like(out.logits[0], dtype=torch.float32)
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = tree.ancestors[0, leaf]
        text = torch.cat((prefix, nodes[path]))
        reference[path] = target(input_ids=text[None], use_cache=False).logits[0, PREFIX:].float()
    spread = reference.std().clamp(min=1e-6)
    return float((out.logits[0].float() - reference).abs().max() / spread)
