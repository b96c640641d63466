"""The layer ids of the target states that a drafter reads, in the two conventions that share the same config keys.

Boundary k is the residual stream that enters layer k, `hidden_states[k]` in transformers; output j is the stream that
layer j returns, boundary j + 1. This library counts boundaries. Engines differ in how they read one list (vLLM:
boundary; SGLang: output, mostly), so a list alone does not tell.
"""

from typing import Any

CONVENTIONS = {"boundary": 0, "output": 1}  # what is added to an id to get the boundary


def resolve(ids: Any, where: str, insisted: str | None, usual: str | None) -> tuple[list[int], str]:
    """Returns the boundary ids of a list in a config, and the reason they were read so.

    `where` names the list in messages. `insisted` is the convention that the user or the key itself names; `usual` that
    of the producer, which is believed unless the numbers tell otherwise. Raises ValueError for a list no trainer can
    have meant, and for one that may mean two things.
    """
    check(ids, where)
    if insisted is not None:
        return [i + CONVENTIONS[insisted] for i in ids], f"{where} {ids} are {insisted} ids"
    shown, reason = _evidence(ids) or (usual, "as this producer counts")
    if shown is None or usual not in (None, shown):
        raise ValueError(
            f"{where} is {ids}, in one of two conventions: the boundary ids are {ids} or {[i + 1 for i in ids]}. "
            'Pass aux_layer_convention="boundary" (as vLLM reads them) or "output" (as SGLang reads them).'
        )
    return [i + CONVENTIONS[shown] for i in ids], f"{where} {ids} are {shown} ids: {reason}"


def check(ids: Any, where: str) -> None:
    """Raises ValueError unless `ids` is a short list of distinct ascending integers >= 0."""
    sound = isinstance(ids, list) and 0 < len(ids) <= 16 and all(type(i) is int and 0 <= i < 10_000 for i in ids)
    if not sound or sorted(set(ids)) != ids:
        raise ValueError(f"{where} is {str(ids)[:80]}; expected 1 to 16 distinct layer ids >= 0 in ascending order.")


def _evidence(ids: list[int]) -> tuple[str, str] | None:
    """Returns the convention that the ids themselves show, and by what sign; None where they show none.

    A trainer's or an engine's default for some depth L gives itself away, and so does the first id.
    """
    if len(ids) == 3:
        first, middle, last = ids
        if first == 2 and middle == (last + 3) // 2:
            return "boundary", f"the engines' default [2, L // 2, L - 3] for L = {last + 3}"
        if first == 1 and middle == (last + 4) // 2 - 1:
            return "output", f"the trainers' default [1, L // 2 - 1, L - 4] for L = {last + 4}"
    if ids[0] == 2:
        return "boundary", "they start at 2, as the engines' default does"
    if ids[0] == 1:
        return "output", "they start at 1, as the trainers' default does"
    return None
