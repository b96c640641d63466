"""The efficiency of `generate` beside the bare forwards of its two models: real shapes, random weights, acceptance
by decree.

Every forward of a generate() call is recorded and run again, the same inputs over caches of the same length, with
nothing around it. *Efficiency* is the seconds of those bare forwards over the seconds of the call. Of a target with
recurrent states the bare forwards read each draft once, one after the other, and none of them again.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from command import add_models, add_rounds, progress, run_benchmark
from synthetic import MARK, synthetic_decoding
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    LlamaConfig,
    NemotronHConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
)

from eagle31_hf.acceptance import track_acceptance
from eagle31_hf.bench import environment, synchronize
from eagle31_hf.cache import adopt as cache
from eagle31_hf.cache_names import cache_argument
from eagle31_hf.cli.parsing import positive
from eagle31_hf.configuration import Eagle31Config
from eagle31_hf.modeling import Eagle31DrafterModel

# Targets by name: fields of a Qwen3Config, or of the class that CLASSES names.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 432,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    # layers of their real sizes, but eight of them in place of 48 and 52, and of Qwen3-Next 32 experts in place of 512
    "qwen3-next-8-layers": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 32,
        "vocab_size": 151936,
    },
    "nemotron-h-8-layers": {
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "layers_block_type": ["linear_attention", "mlp"] * 2 + ["full_attention", "mlp", "linear_attention", "mlp"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
    },
}
CLASSES: dict[str, Any] = {
    "llama-3.1-8b": LlamaConfig,
    "qwen3-next-8-layers": Qwen3NextConfig,
    "nemotron-h-8-layers": NemotronHConfig,
}
SHARED_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
DRAFT_VOCABULARY = 32000


@dataclass(frozen=True)
class Setting:
    """One way to decode: knobs of generate(), the chances that drafts are kept to each depth, rows of the batch."""

    name: str
    knobs: dict[str, Any]
    survival: tuple[float, ...]
    rows: int = 1


def geometric(rate: float, depth: int) -> tuple[float, ...]:
    """Returns the chances that drafts are kept to each depth, where every position is accepted with chance `rate`."""
    return tuple(rate ** (position + 1) for position in range(depth))


TREE = {"num_assistant_tokens": 5, "draft_tree_top_k": 4, "draft_tree_total_tokens": 16}
SETTINGS = (
    Setting("chain K=5", {"num_assistant_tokens": 5}, geometric(0.8, 5)),
    Setting("tree of 16, 5 deep", TREE, geometric(0.8, 5)),
    Setting("chain K=5", {"num_assistant_tokens": 5}, geometric(0.8, 5), rows=4),
    Setting("tree of 16, 5 deep", TREE, geometric(0.8, 5), rows=4),
    Setting("auto", {"num_assistant_tokens": "auto"}, geometric(0.8, 12)),
    Setting("auto, nothing accepted", {"num_assistant_tokens": "auto"}, (0.0,)),
)


def build(shape: str, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[PreTrainedModel, Eagle31DrafterModel]:
    """A target of a shape and its drafter, weights N(0, 0.02), neither trained nor able to end a text."""
    torch.manual_seed(seed)
    fields = SHAPES[shape]
    config = CLASSES.get(shape, Qwen3Config)(
        **fields, max_position_embeddings=40960, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    drafter_config = Eagle31Config(
        vocab_size=fields["vocab_size"],
        draft_vocab_size=min(DRAFT_VOCABULARY, fields["vocab_size"] // 2),
        max_position_embeddings=40960,
        logit_scale=8.0,  # as peaked as a trained drafter's, so that trees grow deep
        **{name: fields[name] for name in SHARED_FIELDS},
    )
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        drafter = Eagle31DrafterModel._from_config(drafter_config, dtype=dtype).eval()
    setattr(target, MARK, True)
    return target, drafter


class Recording:
    """The forwards of two models within a `with`: arguments, and where each cache stood."""

    def __init__(self, target: PreTrainedModel, drafter: Eagle31DrafterModel):
        self.models, self.calls = (target, drafter), list[tuple[int, tuple, dict[str, Any], int, tuple]]()
        self._stack = ExitStack()

    def __enter__(self) -> "Recording":
        """By the classes of the models: a target with recurrent states decodes otherwise where it has hooks."""
        for i, model in enumerate(self.models):
            self._stack.enter_context(patch.object(type(model), "__call__", self._recorded(i)))
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    def _recorded(self, i: int) -> Callable[..., Any]:
        """Returns what the class of a model calls meanwhile."""

        def call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            self._add(i, args, kwargs)
            return torch.nn.Module.__call__(model, *args, **kwargs)

        return call

    def _add(self, i: int, args: tuple, kwargs: dict[str, Any]) -> None:
        past = next(value for value in kwargs.values() if isinstance(value, Cache))
        place = cache.slot_layers(past)[0].placement
        self.calls.append(
            (
                i,
                args,
                {name: value for name, value in kwargs.items() if value is not past},
                cache.length(past),
                (place.slots, place.written, place.low, place.high),
            )
        )

    @torch.no_grad()
    def replay(self, num_rows: int, num_tokens: int) -> float:
        """Runs every forward but the prompt's again, over caches filled with as many tokens; returns seconds."""
        with ExitStack() as stack:
            of_target = DynamicCache(config=self.models[0].config)
            place = stack.enter_context(cache.slots(of_target, num_tokens))
            filled = [(of_target, place), cache.slot_cache(self.models[1].config)]
            return self._replay(filled, num_rows, num_tokens)

    def _replay(self, filled: list[tuple], num_rows: int, num_tokens: int) -> float:
        target, drafter = self.models
        ids = torch.zeros(num_rows, num_tokens, dtype=torch.long, device=target.device)
        target(ids, **cache_argument(target.forward, filled[0][0]), logits_to_keep=1)
        states = torch.randn(*ids.shape, drafter.config.hidden_size, dtype=drafter.dtype, device=target.device)
        drafter(ids, hidden_states=states, past_key_values=filled[1][0], logits_to_keep=1)
        synchronize()
        seconds = 0.0
        for i, args, kwargs, end, placed in self.calls:
            if end == 0:
                continue
            past, place = filled[i]
            place.slots, place.written, place.low, place.high = placed
            for layer in cache.slot_layers(past):
                layer.settle(end)
            began = time.perf_counter()
            self.models[i](*args, **kwargs, **cache_argument(self.models[i].forward, past))
            synchronize()
            seconds += time.perf_counter() - began
        return seconds


def measure_engine(
    shape: str = "qwen3-0.6b",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    prompt_length: int = 128,
    max_new_tokens: int = 64,
    rounds: int = 3,
    settings: tuple[Setting, ...] = SETTINGS,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measures every setting beside plain generate, in turn, `rounds` times. Returns medians: {"target", "runs",
    "environment"}."""
    progress(f"building a target and a drafter of the shape {shape}")
    target, drafter = build(shape, dtype, device)
    runs = []
    for setting in settings:
        progress(f"{setting.name}, {setting.rows} row{'s' * (setting.rows > 1)}")
        torch.manual_seed(0)
        prompt = torch.randint(0, target.config.vocab_size, (setting.rows, prompt_length), device=device)
        runs.append(_measure(target, drafter, setting, prompt, max_new_tokens, rounds))
    return {
        "target": {
            "shape": shape,
            "tokens_per_second": max(run["tokens_per_second_alone"] for run in runs if run["rows"] == 1),
        },
        "runs": runs,
        "environment": environment(
            target, prompts=1, max_new_tokens=max_new_tokens, prompt_tokens=prompt_length, rounds=rounds
        ),
    }


def seconds_of_call(
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    setting: Setting | None,
    prompt: Tensor,
    max_new_tokens: int,
    seed: int = 0,
    **generate: Any,
) -> float:
    """Decodes after prompts (B, L), with a setting or, None, by the target alone, greedily unless options for
    `generate` say otherwise; returns the seconds."""
    options: dict[str, Any] = {"do_sample": False, **generate}
    if setting is not None:
        options["custom_generate"] = synthetic_decoding(drafter, setting.knobs, setting.survival, seed)
    synchronize()
    began = time.perf_counter()
    target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **options)
    synchronize()
    return time.perf_counter() - began


def _measure(
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    setting: Setting,
    prompt: Tensor,
    max_new_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    seconds_of_call(target, drafter, setting, prompt, max_new_tokens)  # warm up
    walls = []
    alone = []
    efficiencies = []
    for seed in range(rounds):
        alone.append(seconds_of_call(target, drafter, None, prompt, max_new_tokens))
        with track_acceptance() as stats, Recording(target, drafter) as recording:
            walls.append(seconds_of_call(target, drafter, setting, prompt, max_new_tokens, seed))
        bare = recording.replay(len(prompt), prompt.shape[1] + max_new_tokens + 64)
        efficiencies.append(bare / (walls[-1] - stats.seconds["prefill"]))
    num_tokens = setting.rows * max_new_tokens
    return {
        "drafter": "eagle31",
        "setting": setting.name,
        "rows": setting.rows,
        "knobs": setting.knobs,
        "survival": setting.survival,
        "tree": setting.knobs.get("draft_tree_top_k", 1) > 1,
        "tokens_per_second": num_tokens / median(walls),
        "tokens_per_second_alone": num_tokens / median(alone),
        "speedup": median(a / w for a, w in zip(alone, walls, strict=True)),
        "mean_accepted_length": stats.mean_accepted_length,
        "accepted_per_position": stats.accepted_per_position,
        "drafted_per_position": stats.drafted_per_position,
        "efficiency": median(efficiencies),
        "efficiencies": efficiencies,
        "seconds": stats.seconds,
        "choices": dict(stats.choices),
        "explanation": stats.explanation,
    }


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    result = measure_engine(
        args.shape,
        getattr(torch, args.dtype),
        args.device,
        args.prompt_tokens,
        args.max_new_tokens,
        args.rounds,
        progress=progress,
    )
    env = result["environment"]
    lines = [
        (
            f"{args.shape}, random weights, {env['dtype']}, {env['device']}, {env['threads']} threads;"
            f" {args.prompt_tokens} + {args.max_new_tokens} tokens, medians of {args.rounds} rounds"
        ),
        f"the target alone: {result['target']['tokens_per_second']:.1f} tokens/s",
        "drafting                rows  accepted length  speedup  efficiency (bare forwards / generate)",
    ]
    lines += [
        f"{run['setting']:<22}  {run['rows']:>4}  {run['mean_accepted_length']:>15.2f}  {run['speedup']:>6.2f}x "
        f" {run['efficiency']:>10.1%}"
        for run in result["runs"]
    ]
    return result, "\n".join([*lines, *(run["explanation"] for run in result["runs"] if run["explanation"])])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, "of which the median counts")
    add_models(parser, [*SHAPES], 128)
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="tokens a sequence (default: 64)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
