"""One call of `generate` with a drafter: its parts, how they may be decoded, and the engine put together from them.

B sequences, L tokens of the prompt.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import OutOfMemoryError, Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..cache import adopt as cache
from ..cache.compressed import has_compressed
from ..modeling import Eagle31DrafterModel
from ..targets.ends import num_logits
from ..targets.few_rows import LOW, few_rows
from ..targets.fused import fused_rows
from ..targets.layers import (
    OF_HOOKS_FOR_ANY_ROWS,
    are_streams_first,
    capture_states,
    decoder_layers,
    has_hooks,
    layers_read,
)
from ..targets.masks import windows_of
from ..targets.probe import why_no_trees
from ..targets.tree_attention import attention_of_rounds, own_attention
from . import processors
from .captured.kept import kept_for
from .captured.seam import Seam, seam_of
from .captured.why import why_not_captured
from .draft_sampler import DraftSampler
from .drafter_runner import MASKED, MOST_LEVELS, runner_of
from .executor import EagerExecutor, OutputCollector, decode
from .noise import Noise
from .planning.auto import MAX_NODES, AutoPlanner
from .planning.buckets import BucketKnowledge, BucketPlanner, plans_of
from .planning.controller import TOP_K
from .planning.costs import MAX_DEPTH
from .planning.knowledge import kept_knowledge, knowledge_of
from .planning.plan import FixedPlanner, Planner, resolve_settings
from .planning.prompt_lookup import LookupPlanner
from .proposer import Proposer
from .read_text import ReadText, keep_read_text, read_text_of
from .refusals import check_inputs, check_request, check_room
from .rejection_sampler import LockStepSampler, RejectionSampler
from .sequences import Sequences, Stopping
from .target_runner import TargetRunner
from .unread_states import UnreadStates

logger = logging.get_logger(__name__)
# Makes the sampler of a call, given the usual one: benchmarks put another in its place.
WrapSampler = Callable[[RejectionSampler], RejectionSampler]


class Request:
    """The arguments that `generate` hands to a decoding method, and the drafter. `input_ids` (B, L) are left-padded;
    `may_capture`: the caller has not set `disable_compile`."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Eagle31DrafterModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ):
        """`kwargs` are `knobs`, `streamer`, `synced_gpus`, and those of the model. Raises ValueError for inputs and
        knobs that cannot be served."""
        knobs = kwargs.pop("knobs")
        self.streamer: BaseStreamer | None = kwargs.pop("streamer", None)
        check_inputs(input_ids, kwargs, kwargs.pop("synced_gpus", False))
        self.settings = resolve_settings(drafter, generation_config, knobs)
        self.target = target
        self.drafter = drafter
        self.input_ids = input_ids
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self.generation_config = generation_config
        self.model_kwargs = kwargs
        self.may_capture = not generation_config.disable_compile


@dataclass(frozen=True)
class Mode:
    """The way a request may be decoded. `may_draft`: the target can verify drafts; `draws_trees`: trees, not only
    chains; `is_lock_step`: sequences of the batch stay equally long, since something looks at all of them at once."""

    may_draft: bool
    draws_trees: bool
    is_lock_step: bool

    @classmethod
    def of(cls, request: Request, runner: TargetRunner, stopping: Stopping) -> "Mode":
        """The mode that serves a request: the freest one that leaves its output as plain decoding would have it."""
        may_draft = can_verify(runner)
        sees_trees = may_draft and can_see_trees(request, runner)
        is_free = (
            sees_trees
            and stopping.is_per_sequence
            and processors.are(request.logits_processor, processors.PER_SEQUENCE)
            and request.streamer is None
            and not (request.generation_config.return_dict_in_generate or runner.cache_outlives_call)
        )
        is_lock_step = len(request.input_ids) > 1 and not is_free
        return cls(may_draft, sees_trees and request.settings.may_draw_trees and not is_lock_step, is_lock_step)


def can_verify(runner: TargetRunner) -> bool:
    """Returns whether drafts are verified at all. Not where attentions are asked for: Falcon then drops its causal
    mask. Not for DeepSeek-V4 with padding: its compressed keys count padding, the mask of several tokens does not."""
    sees_less = runner.seen is not None and has_compressed(runner.past_key_values)
    if sees_less:
        name = type(runner.target).__name__
        logger.warning_once(
            f"EAGLE drafting: nothing is drafted for padded prompts of {name}: it compresses padding, too."
        )
    return not (sees_less or runner.model_kwargs.get("output_attentions"))


def can_see_trees(request: Request, runner: TargetRunner) -> bool:
    """Returns whether trees, and sequences of different lengths, can be verified; tried only where they are wanted.

    Hidden states of a tree's nodes are not the sequence's; flash attention in the drafter takes no mask of a tree.
    """
    config = request.generation_config
    if len(request.input_ids) == 1 and not request.settings.may_draw_trees:
        return False
    if config.return_dict_in_generate and config.output_hidden_states:
        return False
    if request.drafter.config._attn_implementation not in MASKED:
        return False
    # without keys there is no attention to tell positions
    is_told = runner.passes_positions(request.input_ids) or not cache.has_keys(runner.past_key_values)
    has_others = partial(has_hooks, of_harmless=OF_HOOKS_FOR_ANY_ROWS)
    is_hooked = runner.mixers.is_needed and any(map(has_others, request.target.modules()))
    return why_no_trees(request.target, is_told, runner.placement is not None, is_hooked) is None


def speculative_decoding(request: Request, wrap_sampler: WrapSampler | None = None) -> Any:
    """Decodes the prompts as `generate` would, several tokens a target forward. Returns what `generate` returns."""
    config, input_ids = request.generation_config, request.input_ids
    runner = TargetRunner(request.target, input_ids, config, request.model_kwargs)
    stopping = Stopping(request.stopping_criteria, config.max_length, request.streamer)
    spare = max(MAX_NODES, request.settings.total_tokens or 0)  # slots beyond the longest text: drafts at its end
    config.disable_compile = True  # of a prompt in chunks over a static cache: hooks would be traced, and our layers
    with cache.slots(runner.past_key_values, runner.num_before + config.max_length + spare) as runner.placement:
        check_room(runner.past_key_values, runner.num_before, input_ids.shape[1], stopping)
        mode = Mode.of(request, runner, stopping)
        seam = seam_of(input_ids.device) or seam_of(request.target.device)
        why_eager = None if seam is None else why_not_captured(request, runner, mode)
        is_captured = seam is not None and why_eager is None
        if is_captured and runner.mixers.is_needed:
            mode = replace(mode, draws_trees=False)  # a tree's paths are sequences of their own in mixers
        noise = noise_of(request, mode, is_captured)
        keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        sampler_class = LockStepSampler if mode.is_lock_step else RejectionSampler
        sampler = sampler_class(request.logits_processor, noise, keeps_scores)
        pad_token = getattr(config, "_pad_token_tensor", None)  # fills sequences that have ended
        sequences = Sequences(input_ids, 0 if pad_token is None else int(pad_token))
        read_text = read_text_of(runner.past_key_values, request.drafter)
        proposer, unread = drafting_of(request, runner, noise, read_text)
        wrapped = sampler if wrap_sampler is None else wrap_sampler(sampler)
        of_layers = layers_read(request.target), are_streams_first(request.target)
        collector = OutputCollector(config, runner.past_key_values, *of_layers)
        eager = EagerExecutor(runner, proposer, unread, wrapped, sequences, stopping, collector)
        layer_ids = request.drafter.config.resolve_layer_ids(len(decoder_layers(request.target)))
        with (
            capture_states(request.target, layer_ids, runner.past_key_values) as eager.unread.captured,
            rows_on_cpu(request, eager, seam),
            runner.mixers,
            executor_of(request, eager, seam, why_eager) as executor,
            settling(executor, eager),
        ):
            return decode(executor, planner_of(request, mode, eager, executor is not eager))


@contextmanager
def settling(executor: Any, eager: EagerExecutor) -> Iterator[None]:
    """A context after which, also after an error, caches hold what is committed, and one that outlives the call what
    the drafter has read."""
    try:
        yield
    finally:
        executor.settle()
        runner = eager.runner
        if runner.cache_outlives_call or eager.collector.wanted:
            runner.mixers.settle()
            with suppress(OutOfMemoryError):  # it only saves later calls time
                keep_read_text(runner.past_key_values, runner.num_before, eager.proposer.runner, eager.unread)


@contextmanager
def rows_on_cpu(request: Request, executor: EagerExecutor, seam: Seam | None) -> Iterator[None]:
    """A context in which rounds on a CPU run the kernels that are fastest for few rows."""
    places = {request.input_ids.device.type, request.target.device.type}
    if seam is not None or not places <= {"cpu", "meta"}:  # offloaded targets are on meta
        yield
        return
    with fused_rows(request.target) as rows, few_rows(request.drafter) as drafter_rows, ExitStack() as stack:
        if rows.is_exact and can_attend_by_position(request, executor.runner):
            stack.enter_context(attention_of_rounds(request.target))
            executor.runner.is_exact = True
        how = f"in {str(request.target.dtype).removeprefix('torch.')}"
        if rows.num_bytes:
            how += f", linear layers packed for the CPU: {(rows.num_bytes + drafter_rows.num_bytes) >> 20} MiB"
        executor.recorder.execution = how
        yield


def can_attend_by_position(request: Request, runner: TargetRunner) -> bool:
    """Returns whether in 16 bits the attention of a chain can give each position what plain rounds give it: in
    the usual form, for one sequence without padding."""
    is_one = len(request.input_ids) == 1 and runner.seen is None
    if runner.mixers.is_needed:
        return False
    config = request.target.config.get_text_config(decoder=True)
    is_usual = own_attention(request.target) == "sdpa" and getattr(config, "kv_lora_rank", None) is None
    is_usual = is_usual and set(windows_of(request.target).values()) == {None}
    return request.target.dtype in LOW and is_one and is_usual and cache.capacity(runner.past_key_values) is None


@contextmanager
def executor_of(request: Request, eager: EagerExecutor, seam: Seam | None, why_eager: str | None) -> Iterator[Any]:
    """A context with what runs the rounds: captured ones, through a seam, or the eager executor, and why."""
    if seam is None:
        yield eager
        return
    if why_eager is None:
        with kept_for(request, eager, seam) as kept:
            if kept is not None and not kept.failures:
                eager.recorder.execution = f"as {seam.name}"
                with kept.serving(eager) as executor:
                    yield executor
                return
            why_eager = kept.failures[0] if kept else "it is within a call in captured rounds"
    eager.recorder.execution = f"eagerly: {why_eager}"
    logger.warning_once(f"EAGLE drafting: rounds of {type(request.target).__name__} run eagerly: {why_eager}.")
    yield eager


def drafting_of(
    request: Request, runner: TargetRunner, noise: Noise | None, read_text: ReadText | None
) -> tuple[Proposer, UnreadStates]:
    """The drafter's side of a request, which goes on after what it has read of the text in the target's cache."""
    first_slots, padding = runner.first_slots, runner.num_padding
    if read_text is not None:  # the last of what it has read stands before the first slot that the target runs
        first_slots = [runner.num_cached - count for count in read_text.counts]
        padding = [padding - runner.num_before for padding in read_text.padding]
    drafting = runner_of(request.drafter, [a - b for a, b in zip(first_slots, padding, strict=True)])
    unread = UnreadStates(drafting.read, first_slots, runner.num_cached)
    if read_text is not None:
        drafting.go_on_with(read_text.layers, read_text.lengths)
        if read_text.unread is not None:
            unread.put(read_text.unread)
    vocab_size = num_logits(request.target)
    threshold = 0.0 if request.settings.is_auto else request.settings.threshold  # auto weighs chances itself
    sampler = DraftSampler(
        request.drafter, vocab_size, request.logits_processor, noise, threshold, len(request.input_ids)
    )
    return Proposer(drafting, sampler), unread


def noise_of(request: Request, mode: Mode, is_captured: bool) -> Noise | None:
    """The random numbers of a sampled call. Rejection sampling accepts more of a chain; coupled noise makes the text
    the same whatever is drafted, for this sequence or others of the batch. It is all that captured rounds know."""
    if not request.generation_config.do_sample:
        return None
    count, length = request.input_ids.shape
    is_coupled = request.settings.is_auto or mode.draws_trees or count > 1 or is_captured
    return Noise(count, num_logits(request.target), request.input_ids.device, is_coupled, length)


def planner_of(request: Request, mode: Mode, eager: EagerExecutor, is_captured: bool) -> Planner:
    """The planner for a request's settings, which takes drafts from the text, too, where drafts may be verified, the
    host sees every token, and sequences advance at their own pace."""
    planner = drafting_planner_of(request, mode, eager, is_captured)
    max_length = request.settings.longest_lookup
    if not max_length or not mode.may_draft or mode.is_lock_step or is_captured:
        return planner
    rows = zip(request.input_ids.tolist(), eager.runner.num_padding, strict=True)
    return LookupPlanner(planner, [ids[padding:] for ids, padding in rows], max_length, num_logits(request.target))


def drafting_planner_of(request: Request, mode: Mode, eager: EagerExecutor, is_captured: bool) -> Planner:
    """The planner of what the drafter drafts; captured rounds take few plans, each as it is. Where the text would
    depend on the drafts of a tree, but not on those of a chain, auto draws chains."""
    settings, do_sample = request.settings, bool(request.generation_config.do_sample)
    if not mode.may_draft:
        return FixedPlanner(0)
    if not settings.is_auto:
        return FixedPlanner.of(settings, mode.draws_trees)
    top_k = (settings.top_k or TOP_K) if mode.draws_trees and not eager.runner.is_exact else 1
    kind = (str(request.input_ids.device), len(request.input_ids), top_k, mode.is_lock_step, do_sample)
    if is_captured:
        buckets = knowledge_of(BucketKnowledge, request.drafter, request.target, *kind, settings.total_tokens)
        return BucketPlanner(buckets, plans_of(settings, mode.draws_trees))
    known = kept_knowledge(request.drafter, request.target, *kind)
    max_depth = MOST_LEVELS if request.drafter.config.is_parallel else MAX_DEPTH
    return AutoPlanner(known, eager.clock, top_k, settings.total_tokens or MAX_NODES, max_depth)


def decode_with(
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    wrap_sampler: WrapSampler | None = None,
    **kwargs: Any,
) -> Any:
    """Decodes for a caller whose request nobody has checked yet: `custom_generate`. `kwargs`: the other arguments of
    `Request`."""
    check_request(target, drafter, generation_config, generation_config.get_generation_mode())
    streamer = kwargs.get("streamer")
    if streamer is not None:  # generate does not know it, so the prompt is still to be put
        streamer.put(input_ids.cpu())
    request = Request(target, drafter, input_ids, generation_config=generation_config, **kwargs)
    return speculative_decoding(request, wrap_sampler)
