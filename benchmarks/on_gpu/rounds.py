"""Rounds of the shapes: eager and captured, chains and trees, short and long contexts, with acceptance by decree."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from engine import Setting, geometric, seconds_of_call

from eagle31_hf.acceptance import track_acceptance
from eagle31_hf.generation.captured.kept import release
from eagle31_hf.generation.captured.seam import Seam, seams
from eagle31_hf.targets.fused import why_not_fused

from .floors import Floor
from .launches import host_waits, launches_of_round
from .machine import bandwidth
from .marked import Marked
from .run import SURVIVAL, Row, Run, Task

MOST_WARMING = 4  # calls


def fused_of(target: Any) -> str:
    """Returns how many of a target's layers, and its final norm, were fused in captured rounds."""
    reasons = why_not_fused(target)
    return f"{reasons.count(None)} of {len(reasons)}"


def chain(depth: int, rows: int = 1) -> Setting:
    """A chain of drafts, kept as SURVIVAL says."""
    return Setting(f"chain {depth}", {"num_assistant_tokens": depth}, SURVIVAL, rows)


def tree(top_k: int, nodes: int, depth: int, length: float) -> Setting:
    """A tree of which `length` tokens a round are kept."""
    knobs = {"num_assistant_tokens": depth, "draft_tree_top_k": top_k, "draft_tree_total_tokens": nodes}
    return Setting(f"tree {nodes}, {length:g} kept", knobs, survival_of(length, depth))


def survival_of(length: float, depth: int) -> tuple[float, ...]:
    """The chances that drafts are kept to each depth, every one with the same chance given the one before, so that
    `length` tokens a round are kept on average, the bonus token included."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if 1 + sum(geometric(rate, depth)) < length else (low, rate)
    return geometric(low, depth)


def eager(run: Run) -> Iterator[Task]:
    """The loop operation by operation, as it is without captures: how long a round takes, how often the host waits, and
    what it launches."""
    shape, setting = run.shapes[0], chain(min(5, max(run.sizes.chains)))
    prompt = run.sizes.prompts[0]
    yield f"{shape}, {setting.name}, eager", partial(timed, run, shape, setting, prompt, is_captured=False)
    for way, seam in (("eager", None), ("captured", run.seam())):
        call = partial(_call, run, shape, setting, seam)
        yield f"{shape}, {setting.name}, host waits, {way}", partial(host_waits, run, call)
        yield f"{shape}, {setting.name}, launches, {way}", partial(launches_of_round, run, call)


def _call(run: Run, shape: str, setting: Setting, seam: Seam | None, new_tokens: int) -> int:
    """Decodes so many tokens; returns the rounds it took."""
    ids = run.ids(shape, setting.rows, run.sizes.prompts[0])
    with seams(lambda device: seam), track_acceptance() as stats:
        seconds_of_call(*run.pair(shape), setting, ids, new_tokens)
    return stats.target_forwards


def captured(run: Run) -> Iterator[Task]:
    """Captured rounds of the first shape."""
    yield from of_shape(run, run.shapes[0])


def of_shape(run: Run, shape: str) -> Iterator[Task]:
    """Captured chains and trees of a shape, at every length of prompt; and what a draft step costs."""
    sizes = run.sizes
    yield f"{shape}, floors", lambda: Floor.of(*run.pair(shape)).as_dict() | {"bandwidth": bandwidth(run)}
    settings = [chain(depth) for depth in sizes.chains]
    settings += [tree(*each, sizes.tree_depth, length) for each in sizes.trees for length in sizes.tree_lengths]
    for prompt in sizes.prompts:
        rows: dict[str, Row] = {}
        for setting in settings:
            name = f"{shape}, {setting.name}, prompt {prompt}"
            yield name, partial(_noted, rows, setting.name, partial(timed, run, shape, setting, prompt))
        yield f"{shape}, draft step, prompt {prompt}", partial(draft_step, rows)


def _noted(rows: dict[str, Row], name: str, measured: Callable[[], Row]) -> Row:
    rows[name] = measured()
    return rows[name]


def draft_step(rows: dict[str, Row]) -> Row:
    """Returns the milliseconds of one draft step: the longest chain's drafting time less the shortest chain's, divided
    by the steps between them."""
    chains = sorted((row for row in rows.values() if row["top_k"] == 1), key=lambda row: row["steps"])
    if len(chains) < 2:
        return {"left_out": "it takes two chains"}
    shortest, longest = chains[0], chains[-1]
    per_step = (longest["draft_ms"] - shortest["draft_ms"]) / (longest["steps"] - shortest["steps"])
    floor = longest["floor_ms"]["step"]
    return {"step_ms": per_step, "floor_ms": {"step": floor}, "over_floor": per_step / floor}


def timed(run: Run, shape: str, setting: Setting, prompt: int, is_captured: bool = True, **generate: Any) -> Row:
    """Decodes after a prompt of so many tokens. Returns tokens a second and the parts of a round, beside the floor."""
    target, drafter = run.pair(shape)
    ids = run.ids(shape, setting.rows, prompt)
    seam = Marked(run.seam(), run.device)
    call = partial(seconds_of_call, target, drafter, setting, ids, run.sizes.new_tokens, **generate)
    release(drafter)  # what another seam has captured
    with seams(lambda device: seam if is_captured else None):
        first = call()
        for _ in range(MOST_WARMING):  # auto may meet a plan later, and captures are no part of what is timed
            captured_before = seam.capture_seconds
            call()
            if seam.capture_seconds == captured_before:
                break
        seam.spans.clear()
        with track_acceptance() as stats:
            seconds = call()
    knobs, num_tokens = setting.knobs, stats.generated_tokens - stats.prefills
    split = seam.split() or _eager_split(stats)
    row = {
        "shape": shape,
        "prompt_tokens": prompt,
        "sequences": setting.rows,
        "knobs": knobs,
        "top_k": knobs.get("draft_tree_top_k", 1),
        "survival": setting.survival,
        "tokens_per_second": num_tokens / (split["round_ms"] * stats.target_forwards / 1000),
        "tokens_per_second_of_call": stats.generated_tokens / seconds,
        "mean_accepted_length": stats.mean_accepted_length,
        "rounds": stats.target_forwards,
        "seconds": dict(stats.seconds),
        "seconds_of_call": seconds,
        "seconds_of_first_call": first,
        "seconds_to_capture": seam.capture_seconds,
        "executions": dict(Counter(stats.executions)),
        **({"fused": fused_of(target)} if is_captured else {}),
        **split,
    }
    return row | _beside_floor(run, shape, setting, prompt, row)


def _eager_split(stats: Any) -> Row:
    """The parts of an eager round, by the phases that the loop times itself."""
    count, seconds = max(1, stats.target_forwards), stats.seconds
    parts = {"draft_ms": seconds["draft"], "verify_ms": seconds["verify"], "accept_ms": seconds["accept"]}
    parts["round_ms"] = sum(parts.values())
    return {name: 1000 * value / count for name, value in parts.items()}


def _beside_floor(run: Run, shape: str, setting: Setting, prompt: int, row: Row) -> Row:
    depth = setting.knobs["num_assistant_tokens"]
    if not isinstance(depth, int):  # auto's vary
        return {}
    context = prompt + run.sizes.new_tokens / 2
    floors = Floor.of(*run.pair(shape)).milliseconds(context, depth, setting.rows, bandwidth(run))
    over = {f"{part}_over_floor": row[f"{part}_ms"] / floors[part] for part in ("round", "verify", "draft")}
    return {"steps": depth, "context": context, "floor_ms": floors, **over}


def others(run: Run) -> Iterator[Task]:
    """Batches, auto and sampling, on the first shape."""
    shape, sizes = run.shapes[0], run.sizes
    depth = min(5, max(sizes.chains))
    for rows in sizes.batches:
        setting = chain(depth, rows)
        name = f"{shape}, {setting.name}, batch of {rows}, prompt {sizes.batch_prompt}"
        yield name, partial(timed, run, shape, setting, sizes.batch_prompt)
    auto = Setting("auto", {"num_assistant_tokens": "auto"}, SURVIVAL)
    yield f"{shape}, auto, prompt {sizes.prompts[0]}", partial(timed, run, shape, auto, sizes.prompts[0])
    sampled = partial(timed, run, shape, chain(depth), sizes.prompts[0], do_sample=True, temperature=0.8)
    yield f"{shape}, chain {depth}, sampled, prompt {sizes.prompts[0]}", sampled
