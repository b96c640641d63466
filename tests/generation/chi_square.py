"""Pearson's test that counts follow known probabilities, without scipy."""

from statistics import NormalDist

from torch import Tensor

ALPHA = 1e-3  # chance that any of `cases` correct samplers fails; seeds are fixed, so a failure repeats
LEAST_EXPECTED = 5.0  # cells expecting fewer counts are pooled


def statistic(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """Counts and probabilities by cell -> the statistic and its degrees of freedom; infinite where the impossible was
    counted."""
    if counts[probabilities == 0].sum() > 0:
        return float("inf"), 1
    expected = counts.sum() * probabilities.double()
    small = expected < LEAST_EXPECTED
    observed = [*counts[~small].tolist(), counts[small].sum().item()]
    expected = [*expected[~small].tolist(), expected[small].sum().item()]
    if expected[-1] < LEAST_EXPECTED:  # too few to be a cell of their own
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True)), len(expected) - 1


def critical_value(df: int, cases: int = 1, alpha: float = ALPHA) -> float:
    """What a correct sampler exceeds with chance `alpha / cases` (Wilson and Hilferty, 1931: right within 1%)."""
    z = NormalDist().inv_cdf(1 - alpha / cases)
    return df * (1 - 2 / (9 * df) + z * (2 / (9 * df)) ** 0.5) ** 3


def follows(counts: Tensor, probabilities: Tensor, cases: int) -> bool:
    """Returns whether counts are what a correct sampler may well give, one of so many that are tested."""
    value, df = statistic(counts, probabilities)
    assert df > 2 or value == float("inf"), "too few cells are likely for a test"
    return value < critical_value(df, cases)
