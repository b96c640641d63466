"""Rivals that torch.compile makes, each run in a process of its own: `python -m ...compiled NAME DEVICE FACTS`, FACTS a
JSON object. Prints one JSON object."""

import json
import sys
import time
from functools import partial
from typing import Any

import torch
from engine import CLASSES, SHAPES, build
from torch import Tensor

from eagle31_hf.bench import synchronize
from eagle31_hf.kernels.distillation_loss import distillation_loss as operation
from eagle31_hf.kernels.tree_attention import MOST_NEW

from .inputs import MAKERS, Maker, Size
from .timing import milliseconds

FEW = 8  # layers of a target whose layers are compiled one by one


def flex(device: str, tokens: int, context: int, capacity: int, heads: int, kv_heads: int, head_dim: int) -> dict:
    """flex_attention of a chain over buffers of which a part is written."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = (1, kv_heads, capacity, head_dim)
    works: list[Any] = []
    attend: Any = torch.compile(flex_attention, dynamic=False)

    def is_seen(b: Tensor, h: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return slot <= context + query

    mask = create_block_mask(is_seen, 1, 1, tokens, capacity, device=device)
    for seed in range(9):
        torch.manual_seed(seed)
        q = torch.randn(1, heads, tokens, head_dim, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        works.append(partial(attend, q, k, v, block_mask=mask, enable_gqa=True))
    began = time.perf_counter()
    works[0]()
    synchronize()
    return {"seconds_to_compile": time.perf_counter() - began, **milliseconds(works, torch.device(device))}


def distillation_loss(device: str, **size: int) -> dict:
    """Times the reference of the distillation loss, compiled by torch."""
    makers = [Maker(Size(**size), torch.bfloat16, torch.device(device), seed) for seed in range(3)]
    made = [MAKERS["distillation_loss"](maker) for maker in makers]
    compiled = torch.compile(operation.reference, dynamic=False, fullgraph=True)
    began = time.perf_counter()
    compiled(*made[0].args)
    synchronize()
    seconds = time.perf_counter() - began
    works: list[Any] = [partial(compiled, *inputs.args) for inputs in made]
    return {"seconds_to_compile": seconds, **milliseconds(works, torch.device(device))}


def static(device: str, shape: str, prompt: int, new_tokens: int, dtype: str) -> dict:
    """The target alone over a static cache: transformers compiles its forward, by default with CUDA graphs."""
    target, _ = build(shape, getattr(torch, dtype), device)
    ids = torch.randint(target.config.vocab_size, (1, prompt), device=device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "cache_implementation": "static"}
    seconds = []
    for count in (new_tokens, new_tokens, new_tokens // 2, new_tokens):  # the longest first: its cache is kept
        synchronize()
        began = time.perf_counter()
        target.generate(ids, max_new_tokens=count, **options)
        synchronize()
        seconds.append(time.perf_counter() - began)
    first, _, half, whole = seconds
    rest = new_tokens - new_tokens // 2
    return {
        "ms_a_token": 1000 * (whole - half) / rest,
        "tokens_per_second": rest / (whole - half),
        "tokens_per_second_of_call": new_tokens / whole,
        "seconds_to_compile": first - whole,
        "seconds": seconds,
    }


def layers(device: str, shape: str, prompt: int, new_tokens: int, depth: int, way: str) -> dict:
    """Captured chains of a target of few layers: with our layers, then with layers that torch compiles (`way`
    "compile") or that Liger has put its own parts in ("liger"). What a layer saves holds for as many as there are."""
    from .rounds import chain, timed
    from .run import Run, Sizes

    torch._dynamo.config.recompile_limit = 64  # every layer has a number of its own, for which it is compiled anew
    short = f"{shape}, {FEW} layers"
    SHAPES[short] = SHAPES[shape] | {"num_hidden_layers": FEW}
    if shape in CLASSES:
        CLASSES[short] = CLASSES[shape]
    run = Run(torch.device(device), (short,), sizes=Sizes(new_tokens=new_tokens))
    ours = timed(run, short, chain(depth), prompt)
    target, _ = run.pair(short)
    if way == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=target)
    else:
        for layer in target.model.layers:
            layer.forward = compiled_for_few(layer.forward)
    theirs = timed(run, short, chain(depth), prompt)
    saved = (ours["verify_ms"] - theirs["verify_ms"]) / FEW
    return {**theirs, "layers": FEW, "verify_ms_of_ours": ours["verify_ms"], "ms_saved_a_layer": saved}


def compiled_for_few(forward: Any) -> Any:
    """A layer's forward that is compiled where it gets a round's tokens; a prompt would be compiled, too, for long."""
    compiled = torch.compile(forward, fullgraph=True, mode="max-autotune-no-cudagraphs")

    def run(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (compiled if states.shape[1] <= MOST_NEW else forward)(states, *args, **kwargs)

    return run


if __name__ == "__main__":
    what, device, facts = sys.argv[1:]
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in the process that asks
    measured = {"flex": flex, "distillation_loss": distillation_loss, "static": static, "layers": layers}[what]
    print(json.dumps(measured(device, **json.loads(facts))))
