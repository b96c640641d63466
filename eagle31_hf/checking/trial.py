"""A tiny target and a drafter fitted to its text, decoded in every way there is and compared with the target alone.

It runs the library's own `generate` on a model of the same class, so what is refused or done otherwise is what the
large one would show.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from ..acceptance import LOCK_STEP, TREES, track_acceptance
from ..checkpoints.sources import first_line
from ..configuration import Eagle31Config
from ..modeling import Eagle31DrafterModel
from ..seeding import seeded
from ..targets.layers import decoder_layers, target_states
from ..targets.probe import FAILURES, why_no_trees
from ..training.objective import Batch, DraftingObjective, Settings
from ..training.target import TargetReader
from ..training.unroll import unroll
from .shrink import tiny_config
from .source import TargetSource, build

SAME_TEXT = "same text"
CHAINS = "chains"
IN_STEP = "in step"
REFUSED = "refused"
DIFFERENT = "different"
UNTRIED = "not tried"
# the drafter is fitted to so many tokens, every sixth of them wrong
PROMPT = (1, 2, 3, 5, 8)
KNOWN_TOKENS = 32
ERROR_EVERY = 6
CHAIN = {"num_assistant_tokens": 4}
TREE = CHAIN | {"draft_tree_top_k": 3, "draft_tree_total_tokens": 10}
AUTO = {"num_assistant_tokens": "auto"}
GREEDY, SHORT = {"max_new_tokens": 24, "do_sample": False}, {"max_new_tokens": 14}
SAMPLED_TOKENS = 14
LOGITS = {"return_dict_in_generate": True, "output_logits": True}
# Ways to decode greedily: name -> how it drafts, what else `generate` is told, and whether there are two prompts.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "chain": (CHAIN, LOGITS, False),
    "tree": (TREE, LOGITS, False),
    "auto": (AUTO, SHORT, False),
    "batch": (TREE, SHORT, True),
    "static_cache": (TREE, SHORT | {"cache_implementation": "static"}, False),
    "prompt_in_chunks": (CHAIN, SHORT | {"prefill_chunk_size": 2}, False),
}
LOGITS_TOLERANCE = 1e-3  # of their standard deviation; other shapes differ by 1e-5 in fp32, a wrong mask by tenths
MOST_PARAMETERS = 30_000_000  # of a tiny target: a second's work on a CPU
# Fields of a drafter's config that decide how it is built, and that a tiny one can have, too.
BUILD = (
    "fc_norm",
    "norm_output",
    "norm_before_fc",
    "norm_before_residual",
    "num_hidden_layers",
    "attention_bias",
    "qk_norm",
    "fc_bias",
    "mlp_bias",
    "hidden_act",
    "logit_scale",
)
LATENT = {"q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


@dataclass(frozen=True)
class Outcome:
    """The result of one try. `word`: "same text" (as the target alone gives), "chains" (the same, but chains where
    trees were asked for), "in step" (the same, but rows of a batch keep one length), "refused" (a ValueError before
    anything is decoded), "different" or "not tried"; `reason`: why, where it is not "same text"."""

    word: str
    reason: str = ""


class CannotTryError(Exception):
    """Raised where no tiny model can be made of a config, or it does not decode; the text says why."""


def build_tiny(source: TargetSource) -> tuple[PreTrainedModel, list[str]]:
    """A tiny model of the target's class with random weights, and what it does not show. Raises CannotTryError."""
    try:
        config, notes = tiny_config(source.config)
        return _sound(source.model_class, config, source.attention), notes
    except CannotTryError:
        raise
    except Exception as error:  # a class of transformers, or of others, may fail on sizes in any way
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if source.decoder is source.config:
        raise CannotTryError(reason)
    try:  # what reads images may need packages that are not there; drafting is about the decoder
        from transformers import AutoModelForCausalLM

        config, notes = tiny_config(source.decoder)
        decoder = _sound(AutoModelForCausalLM._model_mapping[type(source.decoder)], config, source.attention)
    except Exception:
        raise CannotTryError(reason) from None
    return decoder, [*notes, f"its decoder was tried by itself ({reason})"]


def _sound(model_class: Any, config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """A model with random weights. Raises CannotTryError where it is too large, or its logits are not finite."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build(model_class, config).parameters())
    if count > MOST_PARAMETERS:
        raise CannotTryError(f"even with small sizes it has {count:,} parameters")
    with seeded(0):
        target = build(model_class, config, attention)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # so that no text ends early
        setattr(target.generation_config, name, None)
    target.generation_config.use_cache = True
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([PROMPT]), use_cache=False).logits
    if not logits.isfinite().all():
        raise CannotTryError("its logits are not finite with small random weights")
    return target


def build_drafter(
    target: PreTrainedModel, like: Eagle31Config | None = None, layer_ids: list[int] | None = None
) -> Eagle31DrafterModel:
    """A tiny drafter for a tiny target, built as `like` is. `layer_ids`: the states of the tiny target it reads."""
    table: Any = target.get_input_embeddings().weight
    num_layers = len(decoder_layers(target))
    width = target.config.get_text_config(decoder=True).hidden_size
    fields: dict[str, Any] = {
        "vocab_size": table.shape[0],
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        # RemBERT's table is narrower than its layers
        "num_key_value_heads": 1,
        "share_target_embeddings": table.shape[1] == width,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "aux_hidden_state_layer_ids": layer_ids or sorted({1, num_layers // 2, num_layers}),
    }
    if like is not None:
        fields |= {name: getattr(like, name) for name in BUILD}
        fields |= LATENT if like.kv_lora_rank is not None else {}
        fields |= {"draft_vocab_size": 3 * table.shape[0] // 4} if like.draft_vocab_size < like.vocab_size else {}
        fields |= (
            {"layer_types": like.layer_types, "sliding_window": 8} if "sliding_attention" in like.layer_types else {}
        )
    with seeded(1):
        drafter = Eagle31DrafterModel._from_config(Eagle31Config(**fields), attn_implementation="sdpa").eval()
    if drafter.d2t is not None:
        drafter.set_draft_vocabulary(
            torch.tensor([i for i in range(fields["vocab_size"]) if i % 4 != 3][: len(drafter.d2t)])
        )
    return drafter


@torch.no_grad()
def fit_head(drafter: Eagle31DrafterModel, target: PreTrainedModel, text: Tensor, depth: int = 4) -> None:
    """Fits the head to a text (1, T) of the target's by least squares from states to next tokens; some are made wrong,
    to be rejected."""
    drafter.load_target_embeddings(target)
    states, logits = target_states(target, text, drafter.config.resolve_layer_ids(len(decoder_layers(target))))
    chosen = logits.argmax(-1)
    chosen[:, ::ERROR_EVERY] += 1  # possibly an id the target does not have
    wanted = one_hot(chosen, max(logits.shape[-1], drafter.config.vocab_size) + 64)[
        ..., : drafter.config.vocab_size
    ].float()
    wanted = wanted if drafter.d2t is None else wanted[..., drafter.draft_to_target_ids()]
    x = torch.cat([normed[0] for normed, _ in unroll(drafter, text, states, depth)])
    y = torch.cat([wanted[0, 1 + k :] for k in range(depth)])
    drafter.lm_head.weight.copy_(8 * torch.linalg.lstsq(x.T @ x + 0.003 * torch.eye(x.shape[1]), x.T @ y).solution.T)


def departures(sequences: Tensor, alone: GenerateDecoderOnlyOutput) -> Iterator[tuple[int, int, float]]:
    """Returns for every row of `sequences` (B, L) that differs from what the target generates alone: the row's
    number, its first new token that differs, and by how much the target's logits there prefer its own token."""
    num_given = alone.sequences.shape[1] - len(alone.logits)
    for row, (ours, own) in enumerate(zip(sequences, alone.sequences, strict=True)):
        places = (ours != own).nonzero()
        if len(places):
            place = int(places[0])
            logits = alone.logits[place - num_given][row].float()
            yield row, place - num_given, float(logits[own[place]] - logits[ours[place]])


def difference(ours: GenerateDecoderOnlyOutput | Tensor, alone: GenerateDecoderOnlyOutput) -> str:
    """Describes the first row that differs from what the target generates alone; "" where none does.

    Logits, which say more of a wrong mask than a few tokens do, are compared where they were asked for. Where tokens
    differ, the text says by how much the target prefers its own: by almost nothing in a tie.
    """
    expected = torch.stack(alone.logits)
    spread = float(expected.std())
    departed = next(departures(ours if isinstance(ours, Tensor) else ours.sequences, alone), None)
    if departed is not None:
        row, step, margin = departed
        return (
            f"row {row} departs at token {step}, which the target scores {margin / spread:.1e} of its logits' spread"
            " below its own"
        )
    if isinstance(ours, Tensor):
        return ""
    error = float((torch.stack(ours.logits) - expected).abs().max()) / spread
    return "" if error <= LOGITS_TOLERANCE else f"logits differ by {error:.1e} of their spread"


def attempt(act: Callable[[], Any], judge: Callable[[Any], Outcome]) -> Outcome:
    """Returns what `judge` says of the result of `act`. A ValueError of `act` is a refusal; other errors, of ours or of
    transformers' code, are "different"."""
    try:
        result = act()
    except ValueError as refusal:
        return Outcome(REFUSED, " ".join(str(refusal).removeprefix("EAGLE drafting: ").split()))
    except FAILURES as error:
        return Outcome(DIFFERENT, named(error))
    return judge(result)


def named(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)[:160]}"


class Trial:
    """A tiny target and its drafter. Each method tries one thing and returns its `Outcome`. Raises CannotTryError for a
    target that fails by itself."""

    def __init__(self, target: PreTrainedModel, drafter: Eagle31DrafterModel):
        self.target, self.drafter = target, drafter
        self.prompt = {
            "input_ids": torch.tensor([PROMPT]),
            "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long),
        }
        try:
            alone = self._alone(self.prompt, GREEDY | {"max_new_tokens": KNOWN_TOKENS})
        except Exception as error:  # as in `build_tiny`
            raise CannotTryError(f"the target alone does not decode ({named(error)})") from None
        self.text, self.keeps_cache = alone.sequences, is_kept(alone.past_key_values)
        with suppress(ValueError, RuntimeError):  # there are no states to learn from, which generate says in a moment
            fit_head(drafter, target, self.text)

    def _alone(self, prompt: dict[str, Tensor], options: dict[str, Any]) -> Any:
        return self.target.generate(**prompt, **options | LOGITS)

    def why_no_drafts(self) -> str | None:
        """The reason why nothing can be drafted for a target that decodes alone; None where nothing is known against
        it."""
        return (
            None
            if self.keeps_cache
            else f"{type(self.target).__name__} keeps no cache, from which rejected drafts could be taken back"
        )

    def _batch(self) -> dict[str, Tensor]:
        """Two prompts of different lengths, padded on the left."""
        longer, shorter = self.text[0, : len(PROMPT) + 3], torch.tensor([0] * 3 + list(PROMPT))
        mask = torch.ones(2, len(longer), dtype=torch.long)
        mask[1, :3] = 0
        return {"input_ids": torch.stack((longer, shorter)), "attention_mask": mask}

    def greedy(self, way: str) -> Outcome:
        """Decodes in one of WAYS, and compares with the target alone. A way in which the target alone fails is "not
        tried"."""
        drafting, options, has_two = WAYS[way]
        prompt = self._batch() if has_two else self.prompt
        asked = GREEDY | options
        try:
            alone = self._alone(prompt, asked)
        except FAILURES as error:
            return Outcome(UNTRIED, f"the target alone fails, too ({named(error)})")
        length = alone.sequences.shape[1]
        if not has_two and not torch.equal(alone.sequences, self.text[:, :length]):
            return Outcome(UNTRIED, "the target alone gives another text with it than without")

        def judge(ours: Any) -> Outcome:
            wrong = difference(ours, alone)
            word = (
                DIFFERENT
                if wrong
                else IN_STEP
                if stats.kinds[LOCK_STEP]
                else CHAINS
                if drafting is TREE and not stats.kinds[TREES]
                else SAME_TEXT
            )
            return Outcome(word, wrong or ("" if word == SAME_TEXT else self.why_otherwise()))

        with track_acceptance() as stats:
            return attempt(
                lambda: self.target.generate(**prompt, assistant_model=self.drafter, **asked, **drafting), judge
            )

    def why_otherwise(self) -> str:
        """The reason why chains were drafted, or rows kept step."""
        return why_no_trees(self.target) or "its cache is not of layers that hold trees and rows of different lengths"

    def sampling(self) -> Outcome:
        """Samples twice with one seed: with the drafter, and in chains with one that drafts what this one holds least
        likely. The text has to be the same, whether drafts are accepted or rejected."""
        contrary = copy.deepcopy(self.drafter)
        contrary.lm_head.weight.data.neg_()
        drafters = ((self.drafter, AUTO), (contrary, AUTO | {"draft_tree_top_k": 1}))

        def judge(texts: list[Tensor]) -> Outcome:
            return (
                Outcome(SAME_TEXT)
                if torch.equal(*texts)
                else Outcome(DIFFERENT, "with one seed the text depends on what is drafted")
            )

        return attempt(lambda: [self._sampled(drafter, drafting) for drafter, drafting in drafters], judge)

    def _sampled(self, drafter: Eagle31DrafterModel, drafting: dict[str, Any]) -> Tensor:
        with seeded(3):
            return self.target.generate(
                **self.prompt, assistant_model=drafter, max_new_tokens=SAMPLED_TOKENS, do_sample=True, **drafting
            )

    def training(self) -> Outcome:
        """One batch's loss and gradients for a copy of the drafter."""
        drafter = copy.deepcopy(self.drafter).train()

        def judge(_: None) -> Outcome:
            gradients = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
            is_sound = bool(gradients) and all(gradient.isfinite().all() for gradient in gradients)
            return (
                Outcome(SAME_TEXT) if is_sound else Outcome(DIFFERENT, "the gradients of a first step are not finite")
            )

        return attempt(lambda: self._first_step(drafter), judge)

    def _first_step(self, drafter: Eagle31DrafterModel) -> None:
        drafter.load_target_embeddings(self.target)
        ids = drafter.config.resolve_layer_ids(len(decoder_layers(self.target)))
        reader = TargetReader(self.target.requires_grad_(False), ids)
        ones = torch.ones_like(self.text)
        batch = Batch(self.text, ones.bool(), ones, *reader.read(self.text, ones))
        DraftingObjective(drafter, Settings(2, (1.0, 0.8)), reader.logits)(batch)["loss"].backward()


def is_kept(past_key_values: Any) -> bool:
    """Returns True where the cache that `generate` returned holds anything. One of a class of the model's own is taken
    to."""
    if type(past_key_values) is not DynamicCache:
        return past_key_values is not None
    # recurrent layers do not say
    return any(getattr(layer, "is_initialized", True) for layer in past_key_values.layers)
