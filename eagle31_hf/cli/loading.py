"""Targets, tokenizers and drafters for the commands, and the arguments that name a pair; what cannot be read is refused
in plain words."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ..checking.source import read_target
from ..checkpoints.producers import drafter_sign
from ..checkpoints.sources import find_config
from ..json_file import read_json
from ..modeling import Eagle31DrafterModel
from ..quantized import KINDS
from .parsing import DTYPES, Parser, knob, progress, reading_options

CAUSAL = "a model that transformers' AutoModelForCausalLM reads"
# the knobs that are options, and what their help says
KNOBS = {
    "num_assistant_tokens": "tokens drafted a round (default: the drafter's own)",
    "draft_tree_top_k": "children of a node; above 1 trees are drafted instead of chains",
    "draft_tree_total_tokens": "nodes of a tree, the root included",
    "prompt_lookup_num_tokens": "tokens of a chain taken from the text, where its last tokens stood before; 0: none",
}


def refuse_drafter(source: str, revision: str | None = None) -> None:
    """Raises OSError where there is no such model, ValueError where it is a drafter, before seconds of loading."""
    sign = drafter_sign(read_json(Path(find_config(source, "target", revision=revision)), constants=True))
    if sign is not None:
        raise ValueError(f"{source}: is a drafter ({sign}); expected the target, which it drafts for.")


def refuse_missing_weights(source: str) -> None:
    """Raises ValueError where a folder's weights have less than a bit for every parameter of its config.

    transformers would make up the rest, tens of gigabytes maybe, before it finds that some are missing.
    """
    if not os.path.isdir(source):
        return
    target = read_target(source)
    count = target.num_parameters if target.num_bytes else None
    if count is not None and 8 * target.num_bytes < count:
        found = f"{source}: its weights are {target.num_bytes:,} bytes, its config.json describes {count:,} parameters"
        raise ValueError(f"{found}; expected the weights of that config. Download it again.")


def load_tokenizer(source: str, revision: str | None = None) -> Any:
    """Loads the tokenizer of a folder or Hub repository. Raises OSError and ValueError in plain words."""
    from transformers import AutoTokenizer

    refuse_drafter(source, revision)
    with reading(source, "its tokenizer cannot be read", "tokenizer.json and what belongs to it beside config.json"):
        # mistral-common's own, which transformers takes where vLLM has brought it, has no template and no added tokens
        return AutoTokenizer.from_pretrained(source, revision=revision, mistral_format=False)


def load_processor(source: str, revision: str | None, target: Any, tokenizer: Any) -> Any:
    """Loads a target's processor, with the tokenizer in it. Returns the tokenizer itself for a target that, as it is
    loaded, reads text alone, and where the processor cannot be loaded."""
    from transformers import AutoProcessor

    if "image" not in target.input_modalities:
        return tokenizer
    try:
        processor = AutoProcessor.from_pretrained(source, revision=revision)
    except Exception as error:  # as of a package that it needs
        progress(f"{source}: images are not read, as its processor cannot be loaded ({' '.join(str(error).split())})")
        return tokenizer
    if hasattr(processor, "tokenizer"):
        processor.tokenizer = tokenizer
    return processor


def auto_class(config: Any, reads_images: bool) -> Any:
    """Returns transformers' class that loads a target: AutoModelForImageTextToText if its config has such a model and
    either images are to be read or it has no causal language model; else AutoModelForCausalLM."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as TEXT
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as IMAGES
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_for_images = type(config) in IMAGES and (reads_images or type(config) not in TEXT)
    return AutoModelForImageTextToText if is_for_images else AutoModelForCausalLM


def load_causal_lm(source: str, reads_images: bool = False, **options: Any) -> Any:
    """Loads a target in eval mode; `reads_images`: as a model that reads images, where there is one; `options`: those
    of `from_pretrained`. Raises OSError and ValueError in plain words."""
    from transformers import AutoConfig

    refuse_drafter(source, options.get("revision"))
    refuse_missing_weights(source)
    with reading(source, "cannot be loaded as a causal language model", CAUSAL):
        config = AutoConfig.from_pretrained(source, revision=options.get("revision"))
        return auto_class(config, reads_images).from_pretrained(source, **options).eval()


def load_outline(source: str, revision: str | None = None, dtype: str = "auto") -> Any:
    """Loads a target's configs, without its weights: a model on the meta device. Raises OSError and ValueError in plain
    words."""
    from transformers import AutoConfig, GenerationConfig

    refuse_drafter(source, revision)
    with reading(source, "is not read as a causal language model", CAUSAL):
        config = AutoConfig.from_pretrained(source, revision=revision)
        dtypes = {} if dtype == "auto" else {"dtype": getattr(torch, dtype)}
        with torch.device("meta"):
            target = auto_class(config, reads_images=False).from_config(config, **dtypes).eval()
    with suppress(OSError):  # without one of its own, what its config says of generation is there already
        target.generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    return target


@contextmanager
def reading(source: str, failure: str, expected: str) -> Iterator[None]:
    """A context in which errors of transformers and tokenizers become ValueErrors that name the source.

    Their readers let KeyError, TypeError and bare exceptions of damaged files through. OSError, RuntimeError,
    ImportError and MemoryError pass as they are.
    """
    try:
        yield
    except (OSError, RuntimeError, ImportError, MemoryError):
        raise
    except Exception as error:
        found = " ".join(str(error).split())[:200]
        raise ValueError(f"{source}: {failure} ({type(error).__name__}: {found}); expected {expected}.") from error


def add_pair(parser: Parser) -> None:
    """Adds the arguments that name the pair and say how it is held and drafts."""
    parser.add_path("--target", "folder or Hub repository of the model to speed up", required=True)
    parser.add_path("--drafter", "folder or Hub repository of an EAGLE 3 or 3.1 drafter for it", required=True)
    for name, what in KNOBS.items():
        parser.add(f"--{name.replace('_', '-')}", knob(name), f"{what}; or auto")
    parser.add("--dtype", DTYPES, "of both models (default: auto, the target's own)", default="auto")
    parser.add("--drafter-weights", KINDS, "hold the drafter's weights in 8 bits (default: as they are)")
    parser.add_reading()


def knobs_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of generate() that say how to draft."""
    return {knob: getattr(args, knob) for knob in KNOBS if getattr(args, knob) is not None}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of generate() for --temperature, 0: greedy; without it sampling is the target's own."""
    sampled = {"temperature": args.temperature} if args.temperature else {}
    return {} if args.temperature is None else {"do_sample": args.temperature > 0, **sampled}


def load_drafter(args: argparse.Namespace, target: Any) -> Any:
    """Loads the drafter, of the target's dtype and on its device."""
    drafter: Any = Eagle31DrafterModel.from_pretrained(args.drafter, dtype=target.dtype, **reading_options(args))
    drafter = drafter.to(target.device).eval()
    if args.drafter_weights is not None:
        drafter.quantize(args.drafter_weights)
    return drafter
