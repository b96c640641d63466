"""Calls with a drafter are plain generate's in everything that a caller can see: rows of what is asked.

A row names what is not as usual. The rest is drawn from its name, as in `soak.py`: prompts, depths, the tokens that end
a text, what criteria and processors favour.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from conftest import TARGETS
from families import NotThereError
from soaking import axes, models
from soaking.callbacks import PLACES
from soaking.trial import Trial, run, usual, without_contradictions

WINDOWED = ("gemma3_window_8",)
SPARSE_TEXT = ("mistral_window_8",)  # whose text uses ten of the eleven ids
OWN_LAYERS = ("LFM2", "DeepSeek-V3.2 (sparse)")  # caches with layers of convolutions, and of an index
GONE_ON = ("qwen3", *WINDOWED)
LOOPED = ("Dory, window, loops", "Inkling2, loops")  # layers that run several times, over keys of each time
FAULTS_OF = {
    place: tuple((place, "own error", call) for call in calls)
    for place, calls in (("processor", (1, 7)), ("streamer", (4,)), ("target", (1, 2, 3, 5)))
}
ALONE = ("chain", "tree"), (1,)
CLEANED_UP = ("own error", "keyboard")  # an error, and what is none by its class


@dataclass(frozen=True)
class Case:
    """Trials of every family with every way to draft, `draws` times. `asked`: entries of other axes; `faults`: place,
    kind and call of what goes wrong, one in each trial."""

    asked: dict[str, str] = field(default_factory=dict)
    families: tuple[str, ...] = ("llama",)
    draftings: tuple[str, ...] = ("chain", "tree")
    batches: tuple[int, ...] = (1, 3)
    faults: tuple[tuple[str, str, int] | None, ...] = (None,)
    draws: int = 1
    accepts: bool = True  # whether a draft of one of them is accepted

    def trials(self, name: str) -> Iterator[Trial]:
        given = product(self.families, self.draftings, self.batches, self.faults, range(self.draws))
        for number, (family, drafting, batch, fault, _) in enumerate(given):
            choices = {axis: usual(axis) for axis in axes.AXES} | {"attention": "sdpa", "drafter attention": "sdpa"}
            choices |= self.asked | {"family": family, "drafting": drafting}
            yield without_contradictions(Trial(name, number, choices, batch, fault))


def case(families=("llama",), draftings=("chain", "tree"), batches=(1, 3), draws=1, **asked: str) -> Case:
    return Case(asked, families, draftings, batches, draws=draws)


def undrafted(families: tuple[str, ...] = tuple(TARGETS), **asked: str) -> Case:
    """Attentions, beside which nothing is drafted."""
    choices = {"attention": "eager", "outputs": "attentions"} | asked
    return Case(choices, families, ("chain",), accepts=False)


def fault(place: str, kinds=CLEANED_UP, calls=(1, 4), draftings=("auto", "tree"), **asked: str) -> Case:
    faults = tuple(product((place,), kinds, calls))
    return Case(asked, WINDOWED, draftings, faults=faults, accepts=False)


ENDS: dict[str, Case] = {
    "length": case(streamer="notes", draws=5),
    "auto": case(TARGETS, ("auto", "auto, chains"), stop="end"),
    "end": case(SPARSE_TEXT, ("chain", "tree", "auto"), streamer="notes", stop="end", draws=4),
    "several ends": case(SPARSE_TEXT, outputs="dict", stop="several ends", draws=3),
    "stop string": case(SPARSE_TEXT, stop="stop string", draws=4),
    "stop string and end": case(SPARSE_TEXT, stop="stop string and end", draws=2),
    "countdown": case(SPARSE_TEXT, stop="countdown", streamer="notes", draws=4),
    "countdown, scores": case(stop="countdown", outputs="scores", draws=2),
    "criterion": case(stop="notes", processors="repetition penalty"),
    "criterion of each sequence": case(stop="ends at", processors="notes", draws=2),
    "criterion of each sequence, and end": case(stop="ends at, and end", processors="notes", draws=3),
    "text streamed": case(batches=(1,), streamer="text", draws=3),
}
PROCESSORS: dict[str, Case] = {
    "state": case(processors="diary", stop="end", draws=3),
    "state, sampled": case(draftings=("auto", "chain"), draws=2, processors="diary", choice="few"),
    "scores written to": case(processors="in place", outputs="scores", draws=2),
    "logits written to": case(processors="in place", outputs="logits", draws=2),
    "allowed tokens": case(processors="allowed tokens", draws=2),
}
OUTPUTS: dict[str, Case] = {
    **{
        name: case(tuple(TARGETS), outputs=name, processors="no repeated bigram", stop="end")
        for name in ("scores", "logits", "states")
    },
    "attentions": undrafted(stop="end"),
    "attentions that sdpa does not return": undrafted(("llama",), attention="sdpa"),
    "attentions of some layers": undrafted(("LFM2", "Gemma4 text, shared keys", "Gemma3n text", "DeepSeek-V4")),
    "attentions of loops": undrafted(LOOPED),
    "states of loops": case(LOOPED, outputs="states", attention="eager"),
    "states of several streams": case(("Gemma3n text", "GLM5-Next"), outputs="states"),
    "attentions over a static cache": undrafted(("qwen3", "mistral_window_8"), cache="conversation, static"),
    "attentions in chunks": undrafted(("qwen3", "mistral_window_8"), cache="chunks"),
}
CACHES: dict[str, Case] = {
    "static": case(tuple(TARGETS), ("chain", "tree", "auto"), cache="static", outputs="logits"),
    "static, asked for its length by alibi": case(("BLOOM",), cache="own, static"),
    "held": case((*GONE_ON, *OWN_LAYERS), ("chain", "tree", "auto"), (1,), cache="held"),
    **{
        cache: case(tuple(TARGETS), ("chain", "tree", "auto"), cache=cache, outputs="logits", stop="end")
        for cache in ("own", "own, no config", "own, static")
    },
    "chunks": case(tuple(TARGETS), ("chain", "tree", "auto"), cache="chunks"),
    "conversation, chunks": case(("llama", *WINDOWED), cache="conversation, chunks"),
    "conversation": case(tuple(TARGETS), ("chain", "tree"), cache="conversation", stop="end"),
    "conversation, static": case(("qwen3", *WINDOWED), ("chain", "tree", "auto"), cache="conversation, static"),
    "conversation, dict": case(tuple(TARGETS), cache="conversation, dict", stop="end"),
    **{
        f"loops, {cache}": case(LOOPED, ("chain", "tree", "auto"), attention="eager", cache=cache, outputs="logits")
        for cache in ("own", "own, no config", "own, static", "chunks", "conversation", "conversation, dict")
    },
    "loops, held": case(LOOPED, ("chain", "tree"), (1,), attention="eager", cache="held"),
}
ADAPTERS: dict[str, Case] = {
    wrapper: case(("qwen3",), ("chain", "tree", "auto") if wrapper == "lora" else ("tree",), wrapper=wrapper)
    for wrapper in ("lora", "lora, merged", "lora, disabled", "lora, two", "ia3")
}
ADAPTERS["lora, sampled"] = case(("qwen3",), ("tree", "auto"), (3,), wrapper="lora", choice="sampled")
FAULTS: dict[str, Case] = {
    **{f"fault in {place}": fault(place) for place in PLACES},
    **{f"fault in {place}, own cache": fault(place, calls=(3,), draftings=("chain",), cache="own") for place in PLACES},
    "fault in target, static": fault("target", calls=(2,), cache="own, static"),
    **{
        f"fault in {place}, {cache}": Case({"cache": cache}, families, *ALONE, faults=FAULTS_OF[place], accepts=False)
        for place in FAULTS_OF
        for cache, families in (("held", (*GONE_ON, *OWN_LAYERS)), ("held, static", GONE_ON))
    },
    **{
        f"fault in {place}, chunks": fault(place, calls=(1, 2, 3), draftings=("chain",), cache="chunks")
        for place in ("target", "drafter")
    },
    "fault in target, loops": Case({"cache": "held"}, LOOPED[:1], *ALONE, faults=FAULTS_OF["target"], accepts=False),
    **{f"fault in {place}, decode": fault(place, calls=(3,), extra="decode") for place in ("processor", "target")},
}
CASES = ENDS | PROCESSORS | OUTPUTS | CACHES | ADAPTERS | FAULTS


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    yield
    models.forget_models()


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_as_plain_generate_has_it(name):
    results: list[Any] = []
    for trial in CASES[name].trials(name):
        try:
            results.append(run(trial))
        except NotThereError:  # in this version of transformers
            continue
        assert [str(one) for one in results[-1].differences if not one.is_tie] == [], trial
    if not results:
        pytest.skip("none of these families is in this version of transformers")
    assert any(any(each.outcome.stats.accepted_per_position) for each in results) or not CASES[name].accepts
    assert any(each.word == "failed alike" for each in results) or CASES[name].faults == (None,)
