"""The library's one decoding loop, entered by the hook and by `custom_generate=drafter.decode`.

L committed tokens, K drafted ones, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..modeling import Eagle31DrafterModel
from .cache import recording_past
from .chain import Eagle31CandidateGenerator
from .checks import check_inputs, check_request, resolve_knobs
from .drafting import Proposal
from .outputs import OutputCollector
from .selftest import why_no_trees
from .statistics import Recorder
from .target import TargetRunner, last_logits
from .verify import Verdict, accept, accept_tree


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
    """Decodes the prompt (1, L) as `generate` would, several tokens a target forward. Returns what `generate` returns."""
    check_inputs(input_ids, model_kwargs, synced_gpus)
    runner = TargetRunner(target, input_ids, generation_config, model_kwargs)
    collector, recorder = OutputCollector(generation_config, runner.past_key_values), Recorder()
    do_sample, eos_token_ids = bool(generation_config.do_sample), end_tokens(stopping_criteria, input_ids.device)
    options = resolve_knobs(drafter, generation_config, knobs)
    if options["tree_top_k"] > 1 and not trees_are_possible(target, drafter, generation_config):
        options["tree_top_k"] = 1
    drafting = Eagle31CandidateGenerator(
        drafter, target, max_length=generation_config.max_length, logits_processor=logits_processor, do_sample=do_sample,
        num_padding=runner.num_padding, num_cached=runner.num_cached, **options,
    )  # fmt: skip
    with drafting, recording_past(runner.past_key_values):
        finished, is_prefill = False, True
        while not finished:
            with recorder.timed("draft"):
                proposal = Proposal(input_ids[:, :0]) if is_prefill else drafting.propose(input_ids)
            with recorder.timed("prefill" if is_prefill else "verify"):
                outputs = runner.prefill(input_ids) if is_prefill else runner.verify(input_ids, proposal)
                logits = last_logits(outputs, proposal.num_rows, input_ids.device)
            with recorder.timed("accept"):
                raw_logits = logits.clone() if collector.logits is not None else None
                with drafting.not_capturing():  # processors and criteria may run the target
                    verdict = judge(input_ids, proposal, logits, logits_processor, do_sample, eos_token_ids)
                    num_tokens, finished = tokens_to_keep(input_ids, verdict, stopping_criteria, collector.scores)
                new_tokens, path = verdict.tokens[:, :num_tokens], verdict.path[:num_tokens]
                input_ids = torch.cat((input_ids, new_tokens), dim=1)
                runner.commit(path, proposal.num_rows)
                drafting.keep(path)
                collector.add(outputs, None if raw_logits is None else raw_logits[:, path], verdict.scores, num_tokens, is_prefill)
            if is_prefill:
                recorder.prefill(num_tokens)
            else:
                recorder.round(proposal.depth, min(verdict.accepted_len, num_tokens), num_tokens)
            if streamer is not None:
                for token in new_tokens[0].cpu():  # one at a time, as plain generate does
                    streamer.put(token[None])
            is_prefill = False
            del outputs
    if streamer is not None:
        streamer.end()
    return collector.result(input_ids)


def decode_with(target: PreTrainedModel, drafter: Eagle31DrafterModel, input_ids: Tensor, *args: Any, **kwargs: Any):
    """`speculative_decoding` for a caller whose request nobody has checked yet: `custom_generate`."""
    generation_config = args[2]
    check_request(target, drafter, generation_config, generation_config.get_generation_mode())
    streamer = kwargs.get("streamer")
    if streamer is not None:  # generate does not know it, so the prompt is still to be put
        streamer.put(input_ids.cpu())
    return speculative_decoding(target, drafter, input_ids, *args, **kwargs)


def judge(input_ids: Tensor, proposal: Proposal, logits: Tensor, *rules: Any) -> Verdict:
    """What of a proposal the target's logits (1, R, V) accept; `rules` are `accept`'s last arguments."""
    if proposal.tree is None:
        return accept(input_ids, proposal.ids, proposal.logits, logits, *rules)
    return accept_tree(input_ids, proposal.tree, logits, *rules)


def trees_are_possible(target: PreTrainedModel, drafter: Eagle31DrafterModel, config: GenerationConfig) -> bool:
    """Attentions and hidden states of a tree's rows are not the sequence's; flash attention in the drafter takes no mask of a tree."""
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return False
    return drafter.config._attn_implementation in ("eager", "sdpa") and why_no_trees(target) is None


def end_tokens(stopping_criteria: StoppingCriteriaList, device: torch.device) -> Tensor | None:
    """The ids that end the text, None where there are none."""
    ids = [criterion.eos_token_id.to(device) for criterion in stopping_criteria if isinstance(criterion, EosTokenCriteria)]
    return torch.cat(ids) if ids else None


def tokens_to_keep(
    input_ids: Tensor, verdict: Verdict, stopping_criteria: StoppingCriteriaList, scores: tuple[Tensor, ...] | None
) -> tuple[int, bool]:
    """How many of the verdict's tokens come before and with the first at which generation stops, and whether it stops."""
    tokens = verdict.tokens
    if all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in stopping_criteria):
        return _first_stop(input_ids.shape[1], tokens, stopping_criteria)
    for count in range(1, tokens.shape[1] + 1):
        so_far = None if scores is None else (*scores, *verdict.scores[:count])
        if stopping_criteria(torch.cat((input_ids, tokens[:, :count]), dim=1), so_far).all():
            return count, True
    return tokens.shape[1], False


def _first_stop(num_committed: int, tokens: Tensor, stopping_criteria: StoppingCriteriaList) -> tuple[int, bool]:
    """The usual case, length and EOS, without building the text token by token."""
    count, finished = tokens.shape[1], False
    for criterion in stopping_criteria:
        if isinstance(criterion, MaxLengthCriteria):
            room = criterion.max_length - num_committed
            if count >= room:
                count, finished = room, True
        else:
            ends = torch.isin(tokens[0], criterion.eos_token_id.to(tokens.device)).nonzero()
            if len(ends) and int(ends[0]) + 1 <= count:
                count, finished = int(ends[0]) + 1, True
    return count, finished
