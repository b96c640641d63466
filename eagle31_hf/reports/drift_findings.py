"""What the figures of a drift report mean, in words, and what to do about it."""

from collections.abc import Iterator

from ..diagnostics.attention_mass import KINDS
from ..diagnostics.drift import Drift, drift_of
from .document import GOOD, NOTE, WARNING, Finding
from .drift_study import FALLEN, Measured
from .figures import Figure, acceptance_by_depth, accepted_length, kept

GROWTH = 1.25  # of the state over all depths, from which on it is said to grow
LEAST_ACCEPTED = 0.1  # share of rounds that accept a depth, below which it is not worth drafting
LEAST_GAIN = 0.05  # of a remedy, to be named
UPGRADE = "Make it EAGLE 3.1 (`eagle31 upgrade`), or train one (`eagle31 train`)."


def findings_of(measured: Measured, depth: int) -> list[Finding]:
    """Returns what is to be said of a drafter, the worst first."""
    drift = drift_of(measured.plain)
    found = [*_of_states(measured, drift), *_of_attention(measured, drift), *_of_depth(measured, depth)]
    found += _of_context(measured)
    order = (WARNING, NOTE, GOOD)
    return sorted(found, key=lambda finding: order.index(finding.level))


def _of_states(measured: Measured, drift: Drift) -> Iterator[Finding]:
    length, steps = accepted_length(measured.plain).shown, f"{drift.growth:.2f}x over {len(drift.states)} steps"
    if drift.growth < GROWTH:
        yield Finding(GOOD, f"{measured.label}: accepted length {length}; the state does not grow ({steps}).")
    else:
        said = f"{measured.label}: accepted length {length}; the state grows {steps}."
        yield Finding(WARNING, said, "" if measured.config.norm_output else UPGRADE)


def _of_attention(measured: Measured, drift: Drift) -> Iterator[Finding]:
    """Says from which depth on the drafter attends to its own tokens more than to the prompt."""
    prompt, made = KINDS.index("prompt"), KINDS.index("self")
    left = next((k for k, masses in enumerate(drift.masses, 1) if masses[made] > masses[prompt]), None)
    if left is not None:
        most = f"{drift.masses[-1][made]:.0%} of layer 0's attention at depth {len(drift.masses)}"
        said = f"{measured.label}: from depth {left} on it attends to its own tokens ({most}) more than to the prompt."
        yield Finding(NOTE, said)


def _of_depth(measured: Measured, depth: int) -> Iterator[Finding]:
    """Says which depths are hardly ever accepted."""
    rates = [figure.value or 0.0 for figure in acceptance_by_depth(measured.plain, depth)]
    useful = next((k for k, rate in enumerate(rates) if rate < LEAST_ACCEPTED), depth)
    if useful < depth:
        said = f"{measured.label}: fewer than one round in {1 / LEAST_ACCEPTED:.0f} accepts depth {useful + 1} or more."
        remedy = f"Draft at most {useful} deep (`num_assistant_tokens={useful}`)." if useful else "It does not fit."
        yield Finding(NOTE if useful else WARNING, said, remedy)


def _of_context(measured: Measured) -> Iterator[Finding]:
    """Says what longer contexts cost, and which remedy gained most there."""
    if not measured.contexts:
        return
    longest = measured.longest
    left = kept(longest.rows, longest.short)
    if left.value is None:
        return
    where = f"{measured.label}: in contexts of {longest.length} tokens"
    said = f"{where} {percent(left)} of the drafts of short ones are accepted."
    if left.value >= FALLEN:
        yield Finding(GOOD, said)
    elif left.high is None or left.high >= 1:
        yield Finding(NOTE, said, f"More prompts would say whether that is chance. {_best_remedy(measured)}")
    else:
        yield Finding(WARNING, said, _best_remedy(measured))


def percent(figure: Figure) -> str:
    """Returns a share in per cent, its interval in brackets."""
    interval = "" if figure.low is None or figure.high is None else f" [{figure.low:.0%}, {figure.high:.0%}]"
    return f"{figure.value:.0%}{interval}"


def _best_remedy(measured: Measured) -> str:
    remedies = [one for one in measured.contexts if one.remedy]
    gains = {one.remedy: kept(one.rows, measured.longest.rows).value for one in remedies}
    known = {remedy: gain for remedy, gain in gains.items() if gain is not None}
    if not known:
        return "Train it on longer texts."
    best, value = max(known.items(), key=lambda pair: pair[1])
    if value < 1 + LEAST_GAIN:
        return "Train it on longer texts; neither windows nor slower rope helped here."
    return f"Train it on longer texts, or set a {best}: {value - 1:+.0%} here."
