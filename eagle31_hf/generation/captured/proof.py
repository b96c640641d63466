"""Proof before trust: what a capture's first rounds compute is compared with forwards that share nothing with it.

The target reads the text anew, by its own attention and into a cache of its own, then the round's drafts. Two rounds of
a plan are compared, since the second one reads what the first has written. B rows, N nodes, V target vocabulary, n*ht
width of a token's captured states.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from ...cache import adopt as cache
from ...cache.masks import SlotMask, ancestors_of
from ...cache.states import forget_states
from ...cache.transfer import Mirrored
from ...cache_names import cache_argument
from ...kernels.drafts import accepted_path
from ...targets.layers import capture_states, decoder_layers, decoder_of, rounded_anew
from ...targets.masks import slot_masks
from ...targets.probe import ANEW, FAILURES, difference, is_rounding
from ...targets.recurrent import Mixers
from ..executor import EagerExecutor
from ..planning.plan import Plan
from ..rejection_sampler import RejectionSampler
from .carry import Carry
from .drafting import Drafts

logger = logging.get_logger(__name__)
ROUNDS = 2  # of a plan that are compared
LONGEST = 8192  # tokens of a text that is read anew, in about a second on an H200; a longer one waits for another call


class WrongRoundError(RuntimeError):
    """Raised where a captured round computes something else than the target does."""


@dataclass
class Verified:
    """The tensors of one verification, which stay at their addresses: the target's logits (B, N, V) and captured states
    (B, N, n*ht), the token chosen after each node and whether its logits decide nothing, both (B, N)."""

    logits: Tensor
    states: Tensor
    chosen: Tensor
    spoiled: Tensor


@dataclass
class Case:
    """A round to be proved: its drafts, the rows that are to be compared, `prompt_length`, left padding included, the
    noise (B, N, V) that tokens are chosen with, the `position` (B, 1), or (axes, B, 1), of each sequence's slot 0, the
    carry as it was before, and what was `verified`."""

    drafts: Drafts
    rows: set[int]
    prompt_length: int
    noise: Tensor | None
    position: Tensor
    before: dict[str, Tensor]
    verified: Verified


def verify_and_prove(rounds: Any, plan: Plan, verify: Callable[[], None], eager: EagerExecutor) -> None:
    """Runs a verification of a plan, and compares the first ones. Raises WrongRoundError, and leaves the carry as it
    was, where one computes something else than the target does; recurrent states have been advanced over committed
    tokens alone."""
    is_long = max(eager.sequences.lengths.host) > LONGEST
    # Keys of an earlier turn may come from another adapter: they cannot be compared.
    is_left = is_long or eager.runner.num_cached or rounds.parts.has_no_memory  # to another call
    if rounds.num_proved[plan] >= ROUNDS or is_left:
        verify()
        return
    carry = rounds.carry
    before = carry.copied()
    drafts = rounds.drafts[plan]
    noise = rounds.noise_of(drafts.depths)
    verify()
    # Where this raises, the round has not been: what it wrote lies past the end of the text.
    try:
        position = eager.runner.last_position - (eager.sequences.prompt_length - 1)  # the carry's own may be wrong
        prompt = eager.sequences.prompt_length
        case = Case(drafts, rounds.unproved_rows, prompt, noise, position, before, rounds.verified[plan])
        _check(eager, case, carry)
        rounds.num_proved[plan] += 1
        rounds.unproved_rows = set()
    except torch.OutOfMemoryError:  # nothing was compared: a round of another call is
        rounds.parts.has_no_memory = True
        logger.warning_once("There was no memory to compare a captured round with the target's own forward.")
    except BaseException as failure:
        carry.put_back(before)
        if isinstance(failure, WrongRoundError) or not isinstance(failure, FAILURES):
            raise
        raise WrongRoundError(f"it cannot be compared ({type(failure).__name__}: {str(failure)[:100]})") from failure


@torch.no_grad()
def write_cache_again(eager: EagerExecutor) -> None:
    """Writes the target's keys, values and states of all texts but for their last tokens anew, by its own forward;
    where there are states, as they were written: the prompt at once, then what was verified."""
    runner, sequences = eager.runner, eager.sequences
    past_key_values = runner.past_key_values
    ids = sequences.padded()[:, :-1]
    places = torch.arange(ids.shape[1], device=ids.device) - (sequences.prompt_length - 1)
    mask = None
    if runner.seen is not None:
        mask = torch.nn.functional.pad(runner.seen, (0, ids.shape[1] - runner.seen.shape[1]), value=True).long()
    positions = (runner.last_position + places).clamp(min=0)
    cache.settle(past_key_values, 0)
    forget_states(past_key_values)
    lengths = [length - 1 for length in sequences.lengths.host]
    _read_texts(runner.mixers, ids, positions, sequences.prompt_length, lengths, mask)
    runner.mixers.settle()
    cache.settle(past_key_values, ids.shape[1])
    eager.unread.captured.drop()


@torch.no_grad()
def _check(eager: EagerExecutor, case: Case, carry: Carry) -> None:
    """Compares a round that has run with the target's own forwards, in the case's rows, the first and the last one.
    Raises WrongRoundError where they differ by more than rounding. In 16 bits that is ANEW times the change that random
    rounding makes."""
    going = case.before["going"][:, 0].nonzero()[:, 0].tolist()
    rows = sorted({going[0], going[-1], *case.rows.intersection(going)}) if going else []
    target = eager.runner.target
    layer_ids = eager.proposer.runner.drafter.config.resolve_layer_ids(len(decoder_layers(target)))
    _check_choice(eager.sampler, case, carry)
    for b in rows:
        _check_forward(target, layer_ids, case, b, eager.stopping.max_length)


def _check_choice(sampler: Any, case: Case, carry: Carry) -> None:
    """Compares what was chosen and committed with the same steps one by one."""
    found, drafts = case.verified, case.drafts
    before = case.before
    if type(sampler) is RejectionSampler:  # a benchmark's own may draw other numbers now
        chosen = sampler.choose_at_nodes(found.logits, drafts, case.noise)[0]
        if not torch.equal(chosen * before["going"], found.chosen * before["going"]):
            raise WrongRoundError("it chooses other tokens than its logits say")
    tree = drafts.ids, drafts.parents, drafts.depths, drafts.bits
    given = *tree, found.chosen, found.spoiled, before["going"], carry.width
    _, tokens, count = accepted_path.reference(*given)
    is_new = torch.arange(carry.width, device=tokens.device) < count
    slots = (before["length"] + torch.arange(carry.width, device=tokens.device)).clamp(max=carry.text.shape[1] - 1)
    text = carry.text.gather(1, slots)
    if not torch.equal(count, carry.count) or not torch.equal(tokens * is_new, text * is_new):
        raise WrongRoundError("it commits other tokens than it accepts")


def _check_forward(target: PreTrainedModel, layer_ids: list[int], case: Case, b: int, end: int) -> None:
    """Compares the logits and states of row b's nodes with those of the target's own forward. `end`: slots of a text
    at most."""
    length = int(case.before["length"][b])
    expected = _of_target(target, layer_ids, case, b)
    # drafts past the end of a text have no position of their own
    is_inside = (length + _visible(case.drafts, b)[0].sum(1) - 1 <= end).to(case.verified.logits.device)
    found = {"logits": case.verified.logits[b], "states": case.verified.states[b]}

    @functools.cache
    def anew() -> dict[str, Tensor]:
        with rounded_anew(target):
            return _of_target(target, layer_ids, case, b)

    def off(values: Tensor, name: str) -> float:
        return difference(values, expected[name], is_inside)

    for name, got in found.items():
        error = off(got, name)
        if not is_rounding(target, error, lambda name=name: ANEW * off(anew()[name], name)):
            raise WrongRoundError(f"its {name} differ from the target's own ({error:.1g} of their spread)")


def _visible(drafts: Drafts, b: int) -> Tensor:
    """The nodes (1, N, N) that each of row b's sees, itself and the root among them."""
    return ancestors_of(drafts.parents[b : b + 1], depth=drafts.ids.shape[1] + 1)


def _of_target(target: PreTrainedModel, layer_ids: list[int], case: Case, b: int) -> dict[str, Tensor]:
    """The "logits" (N, V) and "states" (N, n*ht) of row b's nodes by the target's own forward, on the device of what
    was verified."""
    length, padding = int(case.before["length"][b]), int(case.before["padding"][b])
    text = case.before["text"][b : b + 1, padding:length]
    position = case.position[..., b : b + 1, :]
    drafts = case.drafts
    visible = _visible(drafts, b)
    depths = visible.sum(2) - 1
    own = DynamicCache(config=target.config.get_text_config(decoder=True))
    prefix = text.shape[1] - 1
    given: dict[str, Any] = cache_argument(target.forward, own)
    if not drafts.is_chain:
        given["attention_mask"] = slot_masks(target, own, SlotMask(Mirrored([prefix]), visible, depths, depths))
    with Mixers(target, own) as mixers:
        positions = position + torch.arange(padding, length - 1, device=text.device)
        _read_texts(mixers, text[:, :-1], positions, case.prompt_length - padding, [prefix])
        with capture_states(target, layer_ids, own) as captured, mixers.verifying(1, drafts.ids.shape[1] + 1):
            logits = target(
                input_ids=torch.cat((text[:, -1:], drafts.ids[b : b + 1]), dim=1),
                position_ids=position + (length - 1) + depths,
                use_cache=True,
                **given,
            ).logits
    device = case.verified.logits.device
    return {"logits": logits[0].to(device), "states": captured.take()[0].to(device)}


def _read_texts(
    mixers: Mixers, texts: Tensor, positions: Tensor, prompt: int, lengths: list[int], mask: Tensor | None = None
) -> None:
    """Has the target of `mixers` read texts (B, T) at positions (B, T), or (axes, B, T), into their cache: all at once
    or, where there are states, the prompts, and then what follows as it was verified, since some mixers make other
    states of it. `prompt`: tokens of each prompt; `lengths`: of each text; `mask` (B, T): 0 where it is padding."""
    decoder, num_tokens = decoder_of(mixers.target), texts.shape[1]

    def read(begin: int, end: int) -> None:
        given: dict[str, Any] = cache_argument(decoder.forward, mixers.cache)
        given |= {} if mask is None else {"attention_mask": mask[:, :end]}
        decoder(input_ids=texts[:, begin:end], position_ids=positions[..., begin:end], use_cache=True, **given)

    end = prompt if mixers.is_needed else num_tokens
    with mixers.finding():
        read(0, end)
    if end < num_tokens:
        with mixers.verifying(len(texts), num_tokens - end):
            read(end, num_tokens)
        mixers.commit([[*range(length - end)] for length in lengths])
