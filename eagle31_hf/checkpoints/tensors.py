"""Names and shapes of a drafter's tensors: what its config implies, other producers write, other networks have."""

import re
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy

import torch
from transformers import MODEL_MAPPING

from ..configuration import Eagle31Config

Shapes = dict[str, tuple[int, ...]]
MASK = "mask_hidden"  # of P-EAGLE; others store it as (1, n*ht) or (1, 1, n*ht)

# Patterns of names on disk -> native names, applied in order, each at most once a name. Each is a spelling that some
# producer writes.
RENAMES = (
    (r"^model\.", ""),  # NeMo prefixes everything but the head and the vocabulary maps
    (r"^midlayer\.(\d+)\.", r"layers.\1."),  # Megatron export
    (r"^midlayer\.", "layers.0."),  # original release, SpecForge, AngelSlim
    (r"^aux_norm_low\.", "fc_norm.0."),  # older SGLang
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^fcs\.(\d+)\.", r"fc_norm.\1."),  # Qwen3.6 heads
    (r"^context_proj\.", "fc."),  # TorchSpec
    (r"^final_norm\.", "norm."),
    (r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),  # SGLang's later layers
)
# Patterns of names that are not read, and why.
DROPPED = (
    (r"rotary_emb\.", "computed from the config"),
    (r"^layers\.[1-9]\d*\.hidden_norm\.", "later layers have one norm before attention, input_layernorm"),
)

# Patterns of names that only other networks have, and what each is called.
OTHER_GRAPHS = (
    (r"lora_[AB]\b", "a LoRA adapter: merge it into its drafter first"),
    (r"(^|\.)(eh_proj|enorm)\.", "an MTP head (eh_proj)"),
    (r"(^|\.)fuse_w1\b", "AngelSlim's hawk variant"),
    (r"\.mlp\.(experts|gate)\.", "a drafter with a mixture-of-experts MLP"),
    (r"\.self_attn\.(g_proj|gate_proj)\.", "a drafter with gated attention"),
)


def native_names(names: Iterable[str], source: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns names on disk -> native names, and the names that are left out -> why.

    Raises ValueError where two names become one.
    """
    renamed = {}
    dropped = {}
    short_names = {name.removeprefix("model.") for name in names}
    for name in sorted(names):
        short = name.removeprefix("model.")
        reason = next((why for pattern, why in DROPPED if re.search(pattern, short)), None)
        is_only_norm = "hidden_norm" in name and short.replace("hidden_norm", "input_layernorm") not in short_names
        if reason is None or is_only_norm:
            renamed[name] = name
            for pattern, replacement in RENAMES:
                renamed[name] = re.sub(pattern, replacement, renamed[name], count=1)
        else:
            dropped[name] = reason
    for target, count in Counter(renamed.values()).items():
        if count > 1:
            found = " and ".join(name for name in renamed if renamed[name] == target)
            raise ValueError(f"{source}: {found} both mean {target}; expected one of them.")
    return renamed, dropped


def refuse_other_graphs(shapes: Shapes, source: str, model_type: str | None) -> None:
    """Raises ValueError for a checkpoint that is no EAGLE 3 drafter, saying what it is; `shapes` has native names."""
    for pattern, what in OTHER_GRAPHS:
        found = next((name for name in sorted(shapes) if re.search(pattern, name)), None)
        if found:
            said = f"{source}: {found} marks {what}"
            raise ValueError(f"{said}; expected an EAGLE 3 or 3.1 drafter, which has no such tensor.")
    num_layers = layer_count(shapes)
    if "fc.weight" not in shapes:
        if "hidden_norm.weight" in shapes:
            said = f"{source}: hidden_norm.weight outside the layers marks a DFlash head"
            raise ValueError(f"{said}; expected an EAGLE 3 or 3.1 drafter.")
        is_target = num_layers > 1 and "layers.0.hidden_norm.weight" not in shapes
        what = "looks like the target itself" if is_target else "is no EAGLE 3 drafter"
        raise ValueError(
            f"{source}: {len(shapes)} tensors in {num_layers} layers and no fc.weight (config.json: model_type"
            f" {model_type!r}): this {what}; expected the drafter's checkpoint."
        )
    if "layers.0.hidden_norm.weight" not in shapes:
        fc = shapes["fc.weight"]
        is_eagle1 = len(fc) == 2 and fc[1] == 2 * fc[0]
        what = "an EAGLE-1 or EAGLE-2 head (fc over [embedding, state])" if is_eagle1 else "another architecture"
        said = f"{source}: fc.weight {fc} without layers.0.hidden_norm.weight marks {what}"
        raise ValueError(f"{said}; expected an EAGLE 3 or 3.1 drafter.")


def layer_count(shapes: Iterable[str]) -> int:
    """Returns the number of layers that native names have: 1 + the highest index."""
    found = (re.match(r"layers\.(\d{1,4})\.", name) for name in shapes)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def expected_tensors(config: Eagle31Config) -> Shapes:
    """Returns native names and shapes of all tensors of a checkpoint with this config.

    They are those of the drafter that transformers makes of it, which is built without memory for its weights. Raises
    ArithmeticError or RuntimeError for sizes that no tensor can have.
    """
    with torch.device("meta"):
        drafter = MODEL_MAPPING[Eagle31Config](deepcopy(config))  # a model writes to its config
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
