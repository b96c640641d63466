"""Answers of the target by an inference engine: servers of vLLM and SGLang.

T tokens of a prompt or an answer. Prompts are sent as ids and answers come back as ids: no text is read again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..targets.ends import execution_device
from .answers import AnswerSource, Temperatures, at_temperature
from .engine_server import Completion, Request, Server
from .self_prompts import LEAST_REPETITIONS, LONGEST_PERIOD
from .servers import Servers

PROBE_TOKENS = 32  # of each answer by which an engine is checked
UNLIKELY = 0.25  # of the likeliest token's probability: rounding does not make a greedy token so unlikely
MOST_UNLIKELY = 0.05  # of the tokens: a quantized target, here or there, errs now and then
MAX_SEED = 2**31 - 1
# vLLM's settings for an answer whose end `repeats_itself`: a pattern shorter than 16 tokens is one of 16 to 31, too.
LOOP = {"min_pattern_size": 16, "max_pattern_size": LONGEST_PERIOD, "min_count": LEAST_REPETITIONS}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# What generate() samples by where neither the call nor the target's generation config says it.
DEFAULTS = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}
# Settings of a generation config that engines do not follow, and the values with which they change nothing.
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (1.0,)),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff"), (0.0,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("stop_strings", "bad_words_ids", "force_words_ids", "constraints"), ([],)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("dola_layers", "top_h", "max_time", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
    "sequence_bias": ({},),
    "token_healing": (False,),
}


def sampling_of(generation: dict[str, Any], config: Any) -> dict[str, Any]:
    """Returns what an engine samples by, as generate(**generation) would with this generation config.

    Raises ValueError for a setting that engines do not follow.
    """
    for name in {**NOT_FOLLOWED, **generation}:
        value = generation[name] if name in generation else getattr(config, name, None)
        if name not in DEFAULTS and value is not None and value not in NOT_FOLLOWED.get(name, ()):
            whose = "" if name in generation else " in the target's generation config"
            raise ValueError(
                f"{name} is {value!r}{whose}, which engines do not follow as generate() does; expected it unset, or no"
                " engine."
            )

    def setting(name: str) -> Any:
        found = (generation.get(name), getattr(config, name, None), DEFAULTS[name])
        return next(value for value in found if value is not None)

    penalty = {"repetition_penalty": setting("repetition_penalty")}
    if not setting("do_sample"):
        return GREEDY | penalty
    if setting("min_p") and setting("top_p") < 1:
        raise ValueError(
            f"min_p is {setting('min_p')} with a top_p of {setting('top_p')}, which engines apply in another order than"
            " generate() does; expected one of the two."
        )
    sampled = {name: setting(name) for name in ("temperature", "top_p", "min_p")}
    return sampled | penalty | {"top_k": setting("top_k") or -1}


@dataclass
class EngineAnswers(AnswerSource):
    """Answers by an engine, which samples as generate() would. `vocab_size`: ids an answer may have. Raises ValueError
    for settings that engines do not follow."""

    engine: Servers
    vocab_size: int

    def __post_init__(self):
        super().__post_init__()
        self.sampling()

    def answers(self, prompts: list[Tensor], temperatures: Temperatures) -> list[Tensor]:
        """Returns the ids of the answer to each prompt (T,), through the token that ends its turn.

        A sampled answer follows from a seed of its own, drawn from torch's generator: within `seeded`, the same prompts
        ask the same again. Raises ValueError for answers that end where the target's do not, RuntimeError where servers
        fail.
        """
        if not prompts:
            return []
        seeds = torch.randint(MAX_SEED, (len(prompts),)).tolist()
        samplings = {temperature: self.sampling(temperature) for temperature in {*temperatures}}
        # Only self-prompted chats have temperatures of their own; what repeats itself in them is refused.
        requests = [
            self._request(prompt, seed, self.options.max_new_tokens, samplings[temperature])._replace(
                loop=None if temperature is None else LOOP
            )
            for prompt, seed, temperature in zip(prompts, seeds, temperatures, strict=True)
        ]
        completions = self.engine.each(Server.complete, requests)
        return [self.checked(request, completion) for request, completion in zip(requests, completions, strict=True)]

    def sampling(self, temperature: float | None = None) -> dict[str, Any]:
        """Returns what the engine samples by, at another temperature where one is given."""
        return sampling_of(at_temperature(self.options.generation, temperature), self.target.generation_config)

    def _request(self, prompt: Tensor, seed: int, most: int, sampling: dict[str, Any]) -> Request:
        return Request(prompt.tolist(), min(most, self.options.max_length - len(prompt)), seed, sampling, self.stops)

    def checked(self, request: Request, completion: Completion) -> Tensor:
        """Returns an answer (T,) that ends as the target's do: with a token that ends its turn, or at the limit.

        Raises ValueError for one that does not, and for ids the target does not have.
        """
        unknown = [token for token in completion.ids if not 0 <= token < self.vocab_size]
        if unknown:
            raise ValueError(
                f"the engine answers with id {unknown[0]}, and the target has {self.vocab_size}; expected an engine"
                " that runs the target."
            )
        answer = self.through_end(torch.tensor(completion.ids, dtype=torch.long))
        if self.is_ended(answer) or (completion.finish == "repetition" and request.loop):
            return answer
        if completion.finish == "stop":
            if completion.ended_by in self.stops and type(completion.ended_by) is int:  # the engine left it out
                return torch.cat([answer, torch.tensor([completion.ended_by])])
            found = f"the last id is {completion.ids[-1]}" if completion.ids else "there is none"
            raise ValueError(
                f"the engine stopped an answer where the target does not end a turn: {found}, it says it stopped at"
                f" {completion.ended_by!r}; expected one of {self.stops}. Let it run with the target's own tokenizer"
                " and generation config."
            )
        if len(answer) < request.max_tokens:
            raise ValueError(
                f"the engine cut an answer after {len(answer)} of {request.max_tokens} tokens; expected all. A limit of"
                " its own is in the way: a shorter length, or max_new_tokens in the generation config it reads."
            )
        return answer[: request.max_tokens]

    def meet(self, prompts: list[Tensor]) -> None:
        """Checks, before anything is written, that the engine gives ids, those the target would give to prompts (T,).

        Raises ValueError for one that does not, RuntimeError for a server that cannot be reached.
        """
        first = prompts or [torch.tensor([self.stops[0] if self.stops else 0])]
        requests = [self._request(prompt, 0, PROBE_TOKENS, GREEDY) for prompt in first]
        self.engine.meet(requests[0]._replace(max_tokens=1, sampling=self.sampling()), self.options.max_length)
        for server in self.engine.all:
            found = [self.engine.patiently(server.complete, request) for request in requests]
            answers = [self.checked(request, completion) for request, completion in zip(requests, found, strict=True)]
            for completion, answer in zip(found, answers, strict=True):
                self._check_words(server.url, completion, answer)
            self._check_likelihood(server.url, requests, answers)
        self.engine.tell(f"answers by {self.engine.name}")

    def recall(self, identity: dict[str, Any]) -> None:
        """Takes from a store what it keeps of its servers (`identity`), instead of asking them: all is answered."""
        if "served" in identity:
            for server in self.engine.all:
                server.model = identity["served"]

    def _check_words(self, name: str, completion: Completion, answer: Tensor) -> None:
        """Compares the engine's text with what the target's tokenizer makes of the ids; spaces and parts of characters
        aside, and whether the end of the turn and what follows it count as text."""
        words = self.text(answer), str(self.tokenizer.decode(completion.ids, skip_special_tokens=True))
        ours, whole, theirs = ("".join(text.replace("\ufffd", "").split()) for text in (*words, completion.text or ""))
        if completion.text and theirs not in (ours, whole):
            raise ValueError(
                f"{name} reads the ids {answer.tolist()} as {completion.text!r}, the target's tokenizer as"
                f" {words[0]!r}; expected an engine that runs the target."
            )

    @torch.no_grad()
    def _check_likelihood(self, name: str, requests: list[Request], answers: list[Tensor]) -> None:
        """Compares greedy answers with the target's own probabilities, where its weights are here."""
        device = execution_device(self.target)
        if device.type == "meta":
            return
        unlikely, total = 0, sum(map(len, answers))
        for request, answer in zip(requests, answers, strict=True):
            ids = torch.cat([torch.tensor(request.prompt), answer])[None].to(device)
            logits = self.target(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1].float()
            chosen = logits.gather(-1, ids[0, len(request.prompt) :, None].to(logits.device))[:, 0]
            unlikely += int(((chosen - logits.amax(-1)).exp() < UNLIKELY).sum())
            del logits  # of all the vocabulary: not two answers' at once
        if unlikely > max(1, MOST_UNLIKELY * total):
            raise ValueError(
                f"{name} gives greedy answers that the target does not: {unlikely} of {total} tokens are unlikely to"
                " it; expected an engine that runs the target."
            )
