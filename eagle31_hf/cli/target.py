"""The target of the commands that make training data and train: loaded here, or run by an engine elsewhere."""

import argparse
from typing import Any

import torch
from accelerate import PartialState

from ..checking.source import read_target
from ..targets.few_rows import free_memory
from ..training.engine_states import EngineStates, engine_states
from ..training.preparation_options import PreparationOptions
from .loading import load_causal_lm, load_outline
from .parsing import progress

QUANTIZATIONS = {"4bit": {"load_in_4bit": True}, "8bit": {"load_in_8bit": True}}
ROOM = 1.25  # times the weights, for a forward


def target_for(
    args: argparse.Namespace, options: PreparationOptions, is_new: bool, in_parts: bool = False
) -> tuple[Any, EngineStates | None]:
    """Returns the target, and the servers that give its states, None where it gives them itself. Where an engine does
    all that is asked of it, it is without weights, on the meta device.

    `is_new`: nothing has been made yet, and what the servers give is compared with the target, where that fits here.
    `in_parts`: see `load_target`.
    Raises ValueError for options that do not go together, and for servers that do not give what is asked.
    """
    if args.engine is None:
        progress(f"loading {args.target}")
        reads_images = options.states and not options.regenerate
        return load_target(args, in_parts, reads_images), None
    progress(f"reading the configs of {args.target}")
    outline = load_outline(args.target, args.revision, args.dtype)
    if not options.states:
        _refuse_loading(args)
        return outline, None
    layer_ids = options.for_target(outline).layer_ids
    source = engine_states(outline, options.engine, layer_ids, options.max_length, progress, args.revision)
    if source is not None:
        _refuse_loading(args)
        if is_new and PartialState().is_main_process:
            _compare(args, source)
        return outline, source
    if not options.regenerate:
        found = f"{' '.join(args.engine)} gives no hidden states, and no answers are asked for"
        others = "servers of vLLM that give states (docs/training.md has the line that starts one)"
        raise ValueError(f"{found}; expected --regenerate too, or {others}.")
    progress(f"the engine gives no hidden states; loading {args.target} for them")
    return load_target(args), None


def _compare(args: argparse.Namespace, source: EngineStates) -> None:
    """Compares the servers' states with the target's own, where its weights are here and there is room for them."""
    size, is_cuda = read_target(args.target, args.revision).num_bytes, torch.device(args.device).type == "cuda"
    room = torch.cuda.mem_get_info(args.device)[0] if is_cuda else free_memory()
    if size is None or ROOM * size > room:
        needed = f"{ROOM * (size or 0) / 1e9:,.1f} GB do not fit in {room / 1e9:,.1f}"
        why = "its weights are not here" if size is None else needed
        progress(f"the states of the layers {source.layer_ids} are not compared with the target's own: {why}")
        return
    target = load_causal_lm(args.target, dtype=args.dtype, revision=args.revision).to(args.device)
    source.compare(target)
    progress("the states are the target's own, on a short text")


def _refuse_loading(args: argparse.Namespace) -> None:
    """Raises ValueError for an option of `add_loading` that means nothing where the target is not loaded."""
    given = {"--device-map": args.device_map, "--tensor-parallel": args.tensor_parallel, "--load-in": args.load_in}
    for option, value in given.items():
        if value:
            found = f"{option} says how to load the target here, where --engine runs it"
            raise ValueError(f"{found}; expected one of the two.")


def load_target(args: argparse.Namespace, in_parts: bool = False, reads_images: bool = False) -> Any:
    """Loads the target as the options of `add_loading` say: its device or devices, its dtype, quantized or not.
    `in_parts`: each process reads and keeps a part of every weight, gathered while its layer runs. `reads_images`: as a
    model that does, where there is one."""
    from transformers import BitsAndBytesConfig
    from transformers.distributed import DistributedConfig

    if args.tensor_parallel and (args.device_map or args.load_in):
        found = "--tensor-parallel splits every weight over processes"
        raise ValueError(f"{found}; expected neither --device-map nor --load-in with it.")
    options: dict[str, Any] = {"dtype": args.dtype, "revision": args.revision, "reads_images": reads_images}
    if args.load_in is not None:
        options["quantization_config"] = BitsAndBytesConfig(**QUANTIZATIONS[args.load_in])
    if args.tensor_parallel:
        return load_causal_lm(args.target, distributed_config=DistributedConfig(tp_plan="auto"), **options)
    if in_parts:
        spread = DistributedConfig(fsdp_size=PartialState().num_processes)
        return load_causal_lm(args.target, distributed_config=spread, **options)
    if args.device_map is None and args.load_in is None:
        return load_causal_lm(args.target, **options).to(args.device)
    # A quantized model cannot be moved once it is loaded.
    return load_causal_lm(args.target, device_map=args.device_map or args.device, **options)
