"""The library's one decoding loop, entered by the hook and by `custom_generate=drafter.decode`.

B rows, L committed tokens, R tokens a row in a target forward, V target vocabulary.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..modeling import Eagle31DrafterModel
from . import cache, processors
from .chain import Eagle31CandidateGenerator
from .checks import Knobs, check_inputs, check_request, resolve_knobs
from .drafting import Proposal
from .outputs import OutputCollector
from .randomness import Draws
from .selftest import why_no_drafts_with_attentions, why_no_trees
from .statistics import Recorder
from .stopping import Stopping
from .target import TargetRunner, last_logits
from .texts import Texts
from .tuning import TOP_K, AutoPilot, FixedPilot, tuner_of
from .verify import Judge, Verdict

# What judges a call's drafts; benchmarks and `eagle31 check` put another in its place.
judge_of: ContextVar[Callable[..., Judge]] = ContextVar("eagle31_judge", default=lambda target, *rules: Judge(*rules))
TREE_TOKENS = 60  # of a tree of fixed depth where its size is not given, as in EAGLE-2
# beyond the longest text: the largest tree auto draws, and what a row that has ended is written over with
SPARE_SLOTS = 64


def speculative_decoding(
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    knobs: dict[str, Any],
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
):
    """Decodes the prompts (B, L) as `generate` would, several tokens a target forward. Returns what `generate` returns."""
    check_inputs(input_ids, model_kwargs, synced_gpus)
    wishes = resolve_knobs(drafter, generation_config, knobs)
    runner = TargetRunner(target, input_ids, generation_config, model_kwargs)
    stopping = Stopping(stopping_criteria, generation_config.max_length, streamer)
    limit = runner.num_before + generation_config.max_length + max(SPARE_SLOTS, wishes.total_tokens or 0)
    # of a prompt in chunks over a static cache: hooks would be traced, and our layers
    generation_config.disable_compile = True
    with cache.slots(runner.past_key_values, limit) as runner.placement:
        may_draft = not runner.model_kwargs.get("output_attentions") or why_no_drafts_with_attentions(target) is None
        sees_trees = may_draft and can_see_trees(target, drafter, generation_config, wishes, runner, input_ids)
        alone = len(input_ids) == 1
        in_step = not alone and not (
            sees_trees
            and stopping.is_rowwise
            and processors.are(logits_processor, processors.ROWWISE)
            and streamer is None
            and not (generation_config.return_dict_in_generate or runner.cache_outlives_call)
        )
        draws_trees = sees_trees and wishes.may_draw_trees and not in_step
        draws = None
        if generation_config.do_sample:
            # Rejection sampling accepts more of a chain; coupled draws make the text the same whatever is drafted, here
            # or in other rows.
            is_coupled = wishes.is_auto or draws_trees or not alone
            draws = Draws(len(input_ids), target.config.get_text_config().vocab_size, input_ids.device, is_coupled)
            draws.start(input_ids.shape[1])
        keeps_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
        loop = Loop(
            runner,
            Eagle31CandidateGenerator(
                drafter,
                target,
                wishes.depth or 1,
                stopping.max_length,
                logits_processor,
                bool(draws),
                wishes.threshold,
                runner.num_padding,
                runner.num_cached,
                draws,
                runner.past_key_values,
            ),
            judge_of.get()(target, logits_processor, draws, stopping.eos_token_ids, keeps_scores),
            stopping,
            Texts(input_ids, pad_token(generation_config), runner.num_padding),
            OutputCollector(generation_config, runner.past_key_values),
            (
                pilot_of(drafter, target, wishes, draws_trees, len(input_ids), bool(draws))
                if may_draft
                else FixedPilot(0, 1, 0)
            ),
            in_step,
        )
        return loop.run()


class Loop:
    """One generate() call. `in_step`: rows commit as many tokens as all of them accept, and stay equally long."""

    def __init__(
        self,
        runner: TargetRunner,
        drafting: Eagle31CandidateGenerator,
        judge: Judge,
        stopping: Stopping,
        texts: Texts,
        collector: OutputCollector,
        pilot: AutoPilot | FixedPilot,
        in_step: bool,
    ):
        self.runner = runner
        self.drafting = drafting
        self.judge = judge
        self.stopping = stopping
        self.texts = texts
        self.collector = collector
        self.pilot = pilot
        self.in_step = in_step
        self.recorder = Recorder()
        self.was_short = False  # drafts may have made the last round's scores NaN: the next does without

    def run(self):
        """The prompt, then rounds of drafting, verifying and accepting until every row has ended."""
        texts, recorder = self.texts, self.recorder
        with self.drafting:
            with recorder.timed("prefill"), self.drafting.reading_prompt(texts.rows()):
                outputs = self.runner.prefill(texts.rows())
                logits = self.logits_of(outputs, 1)
            proposal = Proposal(texts.rows()[:, :0], is_plain=True)
            verdict, _ = self.accept(outputs, logits, proposal, is_prefill=True)
            recorder.prefill([len(tokens) for tokens in verdict.tokens])
            while not all(texts.finished):
                with recorder.timed("draft"):
                    proposal = self.propose()
                with recorder.timed("verify"):
                    outputs = self.runner.verify(texts, proposal)
                    logits = self.logits_of(outputs, proposal.num_rows)
                with recorder.timed("accept"):
                    verdict, accepted = self.accept(outputs, logits, proposal)
                num_tokens = [len(tokens) for tokens in verdict.tokens]
                recorder.round(proposal.depth, accepted, num_tokens)
                self.pilot.learn(proposal, verdict, recorder.last, sum(num_tokens))
                del outputs, logits
        if self.stopping.streamer is not None:
            self.stopping.streamer.end()
        recorder.choices(self.pilot.choices, self.pilot.explain())
        return self.collector.result(texts.rows().clone())

    def logits_of(self, outputs: CausalLMOutputWithPast, num_rows: int) -> Tensor:
        """The last rows' logits (B, num_rows, V), in fp32 unless the largest of them is all that matters."""
        are_read_only = self.judge.only_compares and not self.in_step and self.collector.logits is None
        return last_logits(outputs, num_rows, self.texts.device, are_read_only)

    def propose(self) -> Proposal:
        """What this round verifies: nothing where a row is at its end, or the pilot says so."""
        texts, capacity = self.texts, cache.capacity(self.runner.past_key_values)
        depth, nodes = self.stopping.max_length - texts.longest - 1, 10**9
        if capacity is not None:  # a static cache's last slots
            nodes = capacity - (self.runner.num_before + texts.longest - 1)
            depth = min(depth, nodes - 1)
        plan = self.pilot.plan(0 if self.was_short else depth, texts.num_rows, self.drafting.num_unread)
        if plan.depth < 1:
            return Proposal(texts.rows()[:, :0], is_plain=self.was_short)
        proposal = self.drafting.propose(
            [texts.row(b) for b in range(texts.num_rows)], plan.depth, plan.policy, min(nodes, plan.max_nodes)
        )
        if self.in_step and self.stopping.eos_token_ids:  # plain decoding feeds padding to rows that have ended
            proposal.ids[torch.tensor(texts.finished, device=texts.device)] = texts.pad_token_id
        return proposal

    def accept(
        self, outputs: CausalLMOutputWithPast, logits: Tensor, proposal: Proposal, is_prefill: bool = False
    ) -> tuple[Verdict, list[int | None]]:
        """Commits what the target's logits (B, R, V) accept of a proposal: to texts, caches, drafter and results.

        Returns it, with the number of drafts accepted in every row, None for one that had ended before.
        """
        texts, scores = self.texts, self.collector.scores
        if self.in_step:
            verdict, finished = self.judge.together(texts, proposal, logits, self.stopping.together(texts, scores))
        else:
            ends = self.stopping.row_by_row(texts, scores)
            verdict = self.judge.row_by_row(texts, proposal, logits, ends)
            finished = ends.rows
        counts = [len(tokens) for tokens in verdict.tokens]
        self.was_short = verdict.is_short(finished)
        accepted = [
            None if ended else min(len(path) - 1, count)
            for path, count, ended in zip(verdict.paths, counts, texts.finished, strict=True)
        ]
        verdict = verdict.cut(counts)
        self.runner.commit(texts, verdict.paths, proposal.num_rows)
        self.drafting.keep(verdict.paths, verdict.tokens)
        texts.append(verdict.tokens)
        texts.finished = finished
        if self.was_short:
            self.runner.wipe(texts)
        if self.judge.draws is not None:
            self.judge.draws.forget(texts.lengths)
        self.collector.add(outputs, logits, verdict, is_prefill)
        return verdict, accepted


def decode_with(target: PreTrainedModel, drafter: Eagle31DrafterModel, input_ids: Tensor, *args: Any, **kwargs: Any):
    """`speculative_decoding` for a caller whose request nobody has checked yet: `custom_generate`."""
    # after the logits processors and the stopping criteria, as generate calls a decoding method
    generation_config = args[2]
    check_request(target, drafter, generation_config, generation_config.get_generation_mode())
    streamer = kwargs.get("streamer")
    if streamer is not None:  # generate does not know it, so the prompt is still to be put
        streamer.put(input_ids.cpu())
    return speculative_decoding(target, drafter, input_ids, *args, **kwargs)


def pad_token(config: GenerationConfig) -> int:
    """What plain generate fills rows with that have ended."""
    token = getattr(config, "_pad_token_tensor", None)
    return 0 if token is None else int(token)


def pilot_of(
    drafter: Eagle31DrafterModel,
    target: PreTrainedModel,
    wishes: Knobs,
    draws_trees: bool,
    num_rows: int,
    do_sample: bool,
) -> AutoPilot | FixedPilot:
    if wishes.depth is None:
        top_k = (wishes.top_k or TOP_K) if draws_trees else 1
        return AutoPilot(
            tuner_of(drafter, target, num_rows, draws_trees, do_sample), top_k, wishes.total_tokens or SPARE_SLOTS
        )
    return FixedPilot(wishes.depth, (wishes.top_k or 1) if draws_trees else 1, wishes.total_tokens or TREE_TOKENS)


def can_see_trees(
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    config: GenerationConfig,
    wishes: Knobs,
    runner: TargetRunner,
    input_ids: Tensor,
) -> bool:
    """Whether trees, and rows of different lengths, can be verified; asked only where they are wanted.

    Attentions and hidden states of a tree's rows are not the sequence's; flash attention in the drafter takes no mask
    of a tree.
    """
    if len(runner.num_padding) == 1 and not wishes.may_draw_trees:
        return False
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return False
    if not runner.takes_slots or drafter.config._attn_implementation not in ("eager", "sdpa"):
        return False
    return why_no_trees(target, runner.passes_positions(input_ids)) is None
