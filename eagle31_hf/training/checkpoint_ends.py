"""The ends of a target read from its checkpoint without its layers, for a target that an engine runs elsewhere."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ..targets.ends import shape_of
from .ends import PROBE_TOKENS, TargetEnds, find_scoring, last_state, parts_of

NOT_OF_LAYERS = ("architectures", "eos_token_id")  # lists of a config that may be as long as it has layers


def ends_from_checkpoint(outline: PreTrainedModel, revision: str | None = None) -> tuple[TargetEnds, nn.Module]:
    """Returns the embedding and head of a target of which `outline` has the configs, in its dtype, and its final norm,
    which makes of the last layer's output what the head reads.

    transformers is asked for the same model with no layers, so that a checkpoint's names mean here what they mean
    there. Raises ValueError for an architecture that cannot be made without layers, or whose logits do not follow from
    its last state.
    """
    config = without_layers(outline.config)
    try:
        with _quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                outline.name_or_path, config=config, dtype=outline.dtype, revision=revision, output_loading_info=True
            )
        bare, found = loaded
        if found["missing_keys"]:
            raise ValueError(f"the checkpoint has no {', '.join(sorted(found['missing_keys']))}")
        bare.eval()
        configs = outline.name_or_path, outline.config, outline.generation_config
        return TargetEnds(*configs, parts_of(bare), find_scoring(bare)), final_norm(bare)
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{outline.name_or_path}: its embedding, head and norm cannot be read without its layers"
            f" ({type(error).__name__}: {reason}); expected an architecture that can be made without layers. Have the"
            " engine answer alone, and read the states here: prepare-data --engine, then prepare-data --states on what"
            " it wrote."
        ) from error


def without_layers(config: Any) -> Any:
    """Returns a copy of a target's config for the same model with no layers. Quantized targets keep these ends in their
    own dtype, which no quantizer has to read."""
    cut = copy.deepcopy(config)
    if hasattr(cut, "quantization_config"):
        del cut.quantization_config
    decoder = cut.get_text_config(decoder=True)
    of_each_layer = [
        name
        for name, value in vars(decoder).items()
        if isinstance(value, list) and len(value) == decoder.num_hidden_layers and name not in NOT_OF_LAYERS
    ]
    decoder.num_hidden_layers = 0
    for name in of_each_layer:
        setattr(decoder, name, [])
    return cut


@torch.no_grad()
def final_norm(bare: PreTrainedModel) -> nn.Module:
    """Returns the module of a target without layers that gives the states which enter its head. Raises ValueError where
    none does."""
    given = list[tuple[nn.Module, Any]]()
    num_ids, _ = shape_of(bare.get_input_embeddings())
    handles = [
        module.register_forward_hook(lambda module, args, output: given.append((module, output)))
        for module in bare.modules()
    ]
    try:
        last = last_state(bare, torch.arange(PROBE_TOKENS)[None] % num_ids)
    finally:
        for handle in handles:
            handle.remove()
    for module, output in given:  # inner modules return before outer ones: the first with this tensor has made it
        if output is last:
            return module
    raise ValueError("no module gives its last state")


@contextmanager
def _quietly() -> Iterator[None]:
    """A context in which transformers does not list the weights of all layers as left out."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
