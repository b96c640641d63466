"""The library's one decoding loop, entered by the hook and by `custom_generate=drafter.decode`."""

from typing import Any

from ..acceptance import PREFILL
from .planning.plan import Planner


def decode(executor: Any, planner: Planner) -> Any:
    """Decodes one call: the prompt, then rounds of drafting, verifying and accepting until every sequence has ended.
    `executor`: an `EagerExecutor`, or what stands in its place. Returns what `generate` returns."""
    recorder = executor.recorder
    first = executor.prefill()
    recorder.show(PREFILL, first)
    planner.begin(first.tokens)
    while not all(executor.sequences.finished):
        room = executor.room()
        plan = planner.plan(room.depth, room.nodes, executor.sequences.going, room.num_unread)
        outcome = executor.round(plan)
        seconds = recorder.show(outcome.kind, outcome.accepted)
        planner.observe(outcome.num_nodes, outcome.accepted, seconds)
    recorder.choices(planner.choices, planner.explain())
    planner.end()
    return executor.result()
