"""A tiny target and a drafter fitted to its text, decoded in every way there is and compared with the target alone.

It runs the library's own `generate` on a model of the same class, so what is refused or done otherwise is what the
large one would show.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from ..acceptance import LOCK_STEP, TREES, track_acceptance
from ..cache.adopt import is_adoptable
from ..cache.states import is_recurrent
from ..cache_names import cache_in
from ..configuration import Eagle31Config
from ..modeling import Eagle31DrafterModel
from ..seeding import seeded
from ..targets.layers import decoder_layers, target_states
from ..targets.probe import FAILURES, HIDDEN, why_no_trees
from ..training.objective import Batch, DraftingObjective, Settings
from ..training.target import TargetReader
from ..training.unroll import unroll
from .shrink import tiny_config
from .source import TargetSource, build, model_class_of

WORKS = "works"
OTHERWISE = "works otherwise"
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
CAPABILITIES = (*WAYS, "sampling", "training")
LOGITS_TOLERANCE = 1e-3  # of their standard deviation; other shapes differ by 1e-5 in fp32, a wrong mask by tenths
MOST_PARAMETERS = 30_000_000  # of a tiny target: a second's work on a CPU


@dataclass(frozen=True)
class Capability:
    """One thing to do with a target, and whether it works. `name`: one of CAPABILITIES. `answer`: "works",
    "works otherwise" (the same text in another way), "refused" (generate or the trainer says so before anything is
    done), "different" (it went wrong: please report) or "not tried". `text`: how, or why not."""

    name: str
    answer: str
    text: str


class CannotTryError(Exception):
    """Raised where no tiny model can be made of a config, or it does not decode; the text says why."""


def build_tiny(source: TargetSource) -> tuple[PreTrainedModel, list[str]]:
    """A tiny model of the target's class with random weights, and what it does not show: of the decoder alone where a
    multimodal one cannot be built, as packages that read images may not be there. Raises CannotTryError."""
    reason = ""
    for config in [source.config] if source.decoder is source.config else [source.config, source.decoder]:
        try:
            model_class = source.model_class if config is source.config else model_class_of(config)
            tiny, notes = tiny_config(config)
            target = _sound(model_class, tiny, source.attention)
            return target, [*notes, *([f"its decoder was tried by itself ({reason})"] if reason else [])]
        except Exception as error:  # a class of transformers, or of others, may fail on sizes in any way
            reason = reason or (str(error) if isinstance(error, CannotTryError) else named(error))
    raise CannotTryError(reason)


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


def build_drafter(target: PreTrainedModel) -> Eagle31DrafterModel:
    """A tiny EAGLE 3.1 drafter for a tiny target."""
    num_ids, table_width = target.get_input_embeddings().weight.shape
    width, num_layers = target.config.get_text_config(decoder=True).hidden_size, len(decoder_layers(target))
    config = Eagle31Config(
        vocab_size=num_ids,
        hidden_size=width,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        share_target_embeddings=table_width == width,  # RemBERT's table is narrower than its layers
        max_position_embeddings=128,
        initializer_range=0.3,
        aux_hidden_state_layer_ids=sorted({1, num_layers // 2, num_layers}),
    )
    with seeded(1):
        return Eagle31DrafterModel._from_config(config, attn_implementation="sdpa").eval()


@torch.no_grad()
def fit_head(drafter: Eagle31DrafterModel, target: PreTrainedModel, text: Tensor, depth: int = 4) -> None:
    """Fits the head to a text (1, T) of the target's by least squares from states to next tokens; some are made wrong,
    to be rejected."""
    drafter.load_target_embeddings(target)
    states, logits = target_states(target, text, drafter.config.resolve_layer_ids(len(decoder_layers(target))))
    chosen = logits.argmax(-1)
    chosen[:, ::ERROR_EVERY] += 1  # possibly an id the target does not have
    ids = drafter.draft_to_target_ids()
    ids = torch.arange(drafter.config.vocab_size, device=chosen.device) if ids is None else ids
    wanted = (chosen[..., None] == ids).float()
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
    for row, step, margin in departures(ours if isinstance(ours, Tensor) else ours.sequences, alone):
        return (
            f"row {row} departs at token {step}, which the target scores {margin / spread:.1e} of its logits' spread"
            " below its own"
        )
    error = 0.0 if isinstance(ours, Tensor) else float((torch.stack(ours.logits) - expected).abs().max()) / spread
    return "" if error <= LOGITS_TOLERANCE else f"logits differ by {error:.1e} of their spread"


def named(error: Exception) -> str:
    """The type of an error and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Trial:
    """A tiny target and its drafter. Raises CannotTryError for a target that fails by itself."""

    def __init__(self, target: PreTrainedModel, drafter: Eagle31DrafterModel):
        self.target, self.drafter = target, drafter
        try:
            alone = target.generate(**self._prompt(), **GREEDY | LOGITS | {"max_new_tokens": KNOWN_TOKENS})
        except Exception as error:  # as in `build_tiny`
            raise CannotTryError(f"the target alone does not decode ({named(error)})") from None
        self.text, cache = alone.sequences, cache_in(alone)
        self.keeps_cache = cache is not None  # one of a class of the model's own is taken to hold something
        if type(cache) is DynamicCache:  # a layer that does not say, as recurrent ones, is taken to hold something
            self.keeps_cache = any(getattr(layer, "is_initialized", True) for layer in cache.layers)
        with suppress(ValueError, RuntimeError):  # there are no states to learn from, which generate says in a moment
            fit_head(drafter, target, self.text)

    def _prompt(self, has_two: bool = False) -> dict[str, Tensor]:
        """PROMPT, or after a longer one of the same text, padded on the left."""
        ids = torch.tensor([PROMPT])
        if has_two:
            ids = torch.stack((self.text[0, : len(PROMPT) + 3], torch.tensor([0] * 3 + list(PROMPT))))
        mask = torch.ones_like(ids)
        mask[1:, :3] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def capabilities(self, refusal: str | None = None) -> list[Capability]:
        """Tries everything. `refusal`: why nothing can be drafted, where that is known. Where chains are refused, so is
        all other decoding."""
        if refusal is None and not self.keeps_cache:
            name = type(self.target).__name__
            refusal = f"{name} keeps no cache, from which rejected drafts could be taken back"
        first = Capability("chain", REFUSED, refusal) if refusal else self.capability("chain")
        if first.answer == REFUSED:
            return [*(replace(first, name=name) for name in CAPABILITIES[:-1]), self.capability("training")]
        found = {"chain": first} | {name: self.capability(name) for name in CAPABILITIES if name != "chain"}
        if found["tree"].answer == OTHERWISE and found["auto"].answer == WORKS:  # of what it chose, none was a tree
            found["auto"] = replace(found["tree"], name="auto")
        return [*found.values()]

    def capability(self, name: str) -> Capability:
        """Tries one of CAPABILITIES. A ValueError is a refusal; other errors, of ours or of transformers' code, are
        "different"."""
        try:
            return Capability(name, *(self._greedy(name) if name in WAYS else getattr(self, f"_{name}")()))
        except ValueError as refusal:
            return Capability(name, REFUSED, " ".join(str(refusal).removeprefix("EAGLE drafting: ").split()))
        except FAILURES as error:
            return Capability(name, DIFFERENT, named(error))

    def _greedy(self, way: str) -> tuple[str, str]:
        """Decodes in one of WAYS, and compares with the target alone. A way in which the target alone fails is "not
        tried"."""
        drafting, options, has_two = WAYS[way]
        prompt, asked = self._prompt(has_two), GREEDY | options
        try:
            alone = self.target.generate(**prompt, **asked | LOGITS)
        except FAILURES as error:
            return UNTRIED, f"the target alone fails, too ({named(error)})"
        if not has_two and not torch.equal(alone.sequences, self.text[:, : alone.sequences.shape[1]]):
            return UNTRIED, "the target alone gives another text with it than without"
        with track_acceptance() as stats:
            ours = self.target.generate(**prompt, assistant_model=self.drafter, **asked, **drafting)
        wrong = difference(ours, alone)
        if wrong:
            return DIFFERENT, wrong
        if has_two and not any(stats.drafted_per_position):
            return OTHERWISE, "nothing is drafted for padded prompts"
        if stats.kinds[LOCK_STEP] or (drafting is TREE and not stats.kinds[TREES]):
            how = "rows keep step, in chains" if stats.kinds[LOCK_STEP] else "chains instead of trees"
            own = DynamicCache(config=self.target.config.get_text_config(decoder=True))
            is_in_slots = is_adoptable(own) and not is_recurrent(own)
            return OTHERWISE, f"{how}: {why_no_trees(self.target, is_in_slots=is_in_slots) or HIDDEN}"  # what is left
        own_pace = "rows of different lengths each at its own pace, " if has_two else ""
        return WORKS, f"{own_pace}same text as the target alone"

    def _sampling(self) -> tuple[str, str]:
        """Samples twice with one seed: with the drafter, and in chains with one that drafts what this one holds least
        likely. The text has to be the same, whether drafts are accepted or rejected."""
        contrary, texts = copy.deepcopy(self.drafter), []
        contrary.lm_head.weight.data.neg_()
        for drafter, drafting in ((self.drafter, AUTO), (contrary, AUTO | {"draft_tree_top_k": 1})):
            options = SHORT | {"do_sample": True} | drafting
            with seeded(3):
                texts.append(self.target.generate(**self._prompt(), assistant_model=drafter, **options))
        if torch.equal(*texts):
            return WORKS, "one text for one seed, whatever is drafted"
        return DIFFERENT, "with one seed the text depends on what is drafted"

    def _training(self) -> tuple[str, str]:
        """Takes the loss of one batch, and its gradients, with a copy of the drafter."""
        drafter = copy.deepcopy(self.drafter).train()
        drafter.load_target_embeddings(self.target)
        ids = drafter.config.resolve_layer_ids(len(decoder_layers(self.target)))
        reader = TargetReader(self.target.requires_grad_(False), ids)
        ones = torch.ones_like(self.text)
        batch = Batch(self.text, ones.bool(), ones, *reader.read(self.text, ones))
        DraftingObjective(drafter, Settings(2, (1.0, 0.8)), reader.logits)(batch)["loss"].backward()
        gradients = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
        if gradients and all(gradient.isfinite().all() for gradient in gradients):
            return WORKS, "a first step has a loss and finite gradients"
        return DIFFERENT, "the gradients of a first step are not finite"
