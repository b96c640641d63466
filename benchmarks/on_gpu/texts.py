"""The text of captured rounds beside that of plain generate: tiny random models in fp32, and the demo pair."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
)

from eagle31_hf.acceptance import track_acceptance
from eagle31_hf.bench import Shape, synchronize
from eagle31_hf.configuration import Eagle31Config
from eagle31_hf.generation.captured.kept import release
from eagle31_hf.generation.captured.seam import Seam, Uncaptured, seams
from eagle31_hf.modeling import Eagle31DrafterModel

from .marked import Marked
from .rounds import fused_of
from .run import Pair, Row, Run, Task

FIELDS: dict[str, Any] = {
    "vocab_size": 4,  # few ids, so that random drafts are right now and then
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,  # a small one makes texts that repeat one token
}
STATES: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 3 + ["linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "decoder_sparse_step": 8,  # beyond the layers: none with experts
    "mlp_only_layers": [*range(7)],
}
TARGETS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "Llama": (LlamaConfig, {}),
    "Qwen3": (Qwen3Config, {}),
    "Mistral, window of 8": (MistralConfig, {"sliding_window": 8}),
    "Qwen3-Next": (Qwen3NextConfig, STATES | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}),
    "LFM2": (Lfm2Config, {"layer_types": ["conv", "full_attention"] * 3 + ["conv"]}),
}
CHAIN = {"num_assistant_tokens": 4}
TREE = {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 12}
SAMPLED = {"do_sample": True, "temperature": 0.8}
# Ways to decode: knobs, options of generate, and the sequences of the batch.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "chain": (CHAIN, {}, 1),
    "tree": (TREE, {}, 1),
    "chain, batch of 3": (CHAIN, {}, 3),
    "tree, batch of 3": (TREE, {}, 3),
    "sampled tree": (TREE, SAMPLED, 1),
    "sampled chain, batch of 3": (CHAIN, SAMPLED, 3),
}
LEFT_PADDING = 3  # tokens, of the second sequence of a batch; the third has one more


def texts(run: Run) -> Iterator[Task]:
    """Every way to decode, for tiny targets: without graphs, and on a GPU captured."""
    for kind in run.sizes.text_targets:
        pair = tiny(kind, run.device)
        for way in WAYS:
            for name, seam in _seams(run).items():
                yield f"{kind}, {way}, {name}", partial(compared, run, pair, way, seam)


def _seams(run: Run) -> dict[str, Seam]:
    found: dict[str, Seam] = {"uncaptured": Uncaptured()}
    return found | ({"captured": run.seam()} if run.is_gpu else {})


def tiny(kind: str, device: torch.device) -> Pair:
    """One of TARGETS and a drafter, random and small."""
    torch.manual_seed(0)
    config_class, fields = TARGETS[kind]
    target = AutoModelForCausalLM.from_config(config_class(**FIELDS | fields), dtype=torch.float32)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = Eagle31Config(**{name: FIELDS[name] for name in names}, initializer_range=0.3)
    drafter = Eagle31DrafterModel._from_config(config, dtype=torch.float32)
    return target.to(device).eval(), drafter.to(device).eval()


def compared(run: Run, pair: Pair, way: str, seam: Seam) -> Row:
    """Decodes in a way, twice: the second time by what the first has captured. Greedy texts are compared with plain
    generate's; sampled ones with those of the rounds without graphs, by the same seed."""
    target, drafter = pair
    knobs, sampling, count = WAYS[way]
    inputs = _inputs(count, run.device)
    decode = partial(_generated, target, inputs | {"max_new_tokens": run.sizes.text_tokens}, sampling)
    release(drafter)
    if sampling:
        expected = _within(Uncaptured(), run, partial(decode, drafter, knobs))[0]
        release(drafter)
    else:
        expected = decode(None, {})
    marked = Marked(seam, run.device, forbids_waits=True)
    found = [_within(marked, run, partial(decode, drafter, knobs)) for _ in range(2)]
    return {
        "equal": all(torch.equal(text, expected) for text, _ in found),
        "differs_at": [_differs_at(text, expected) for text, _ in found],
        "mean_accepted_length": found[0][1].mean_accepted_length,
        "executions": dict(found[0][1].executions),
        "fused": fused_of(target),
        "waits_forbidden": marked.forbids_waits,
        "seconds_to_capture": marked.capture_seconds,
    }


def _inputs(count: int, device: torch.device) -> dict[str, Tensor]:
    """Prompts, left-padded but for the first."""
    ids = torch.tensor([[1, 2, 3, 0, 2, 1, 3, 1]]).repeat(count, 1)
    mask = torch.ones_like(ids)
    for b in range(1, count):
        mask[b, : LEFT_PADDING + b - 1] = 0
        ids[b] = (ids[b] + b) % FIELDS["vocab_size"]
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _generated(
    target: PreTrainedModel,
    inputs: dict[str, Any],
    sampling: dict[str, Any],
    drafter: Eagle31DrafterModel | None,
    knobs: dict[str, Any],
) -> Tensor:
    torch.manual_seed(0)
    options = {"do_sample": False, **sampling} | ({} if drafter is None else {"assistant_model": drafter, **knobs})
    return target.generate(**inputs, **options)


def _within(seam: Any, run: Run, decode: Callable[[], Tensor]) -> tuple[Tensor, Any]:
    with seams(lambda device: seam), track_acceptance() as stats:
        return decode(), stats


def _differs_at(text: Tensor, expected: Tensor) -> int | None:
    """The first token that differs, counted from the text's beginning; None where none does."""
    if text.shape != expected.shape:
        return min(text.shape[1], expected.shape[1])
    differing = (text != expected).any(0).nonzero()
    return int(differing[0]) if len(differing) else None


DEMO_SHAPES = (Shape(5), Shape(7, 10, 60))


def demo(run: Run) -> Iterator[Task]:
    """The demo pair, with its real acceptance, beside the target alone; in fp32 the texts are equal."""
    assert run.load_demo is not None
    target, drafters, prompts = run.load_demo(str(run.device))
    prompts = [prompt.to(run.device) for prompt in prompts[: run.sizes.demo_prompts]]
    for dtype in (torch.float32, torch.bfloat16) if run.is_gpu else (torch.float32,):
        target.to(dtype)  # type: ignore[arg-type]
        _demo_texts(target, prompts[:1], 8)
        expected, speed = _demo_texts(target, prompts, run.sizes.demo_tokens)
        yield f"demo, {dtype}, the target alone", {"tokens_per_second": speed, "dtype": str(dtype)}.copy
        for name, drafter in drafters.items():
            drafter.to(dtype)  # type: ignore[arg-type]
            for shape in DEMO_SHAPES:
                options = {"assistant_model": drafter, **shape.measured_knobs}
                row = partial(_demo_row, run, target, options, prompts, expected)
                yield f"demo, {dtype}, {name}, {shape.name}", row


def _demo_row(
    run: Run, target: PreTrainedModel, options: dict[str, Any], prompts: list[Tensor], expected: list[Tensor]
) -> Row:
    seam = Marked(run.seam(), run.device)
    with seams(lambda device: seam):
        _demo_texts(target, prompts[:1], run.sizes.demo_tokens, **options)
        seam.spans.clear()
        with track_acceptance() as stats:
            texts, speed = _demo_texts(target, prompts, run.sizes.demo_tokens, **options)
    return {
        "equal": all(map(torch.equal, texts, expected)),
        "tokens_per_second": speed,
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_rates": stats.acceptance_rates,
        "executions": dict(stats.executions),
        "seconds_to_capture": seam.capture_seconds,
    }


def _demo_texts(
    target: PreTrainedModel, prompts: list[Tensor], max_new_tokens: int, **options: Any
) -> tuple[list[Tensor], float]:
    """Decodes prompts (1, L) greedily: their texts, and tokens a second."""
    options |= {"max_new_tokens": max_new_tokens, "do_sample": False}
    generate: Any = target.generate
    synchronize(target.device)
    began = time.perf_counter()
    texts = [generate(prompt, attention_mask=torch.ones_like(prompt), **options) for prompt in prompts]
    synchronize(target.device)
    seconds = time.perf_counter() - began
    return texts, sum(text.shape[1] - prompt.shape[1] for text, prompt in zip(texts, prompts, strict=True)) / seconds
