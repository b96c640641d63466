"""The one comparison of tensors. A failure says what differs, where, and both values."""

import torch
from torch import Tensor

EXACT = 0.0  # token ids, masks, and tensors that must come out of the very same operations
# fp32: one forward in another order of summation, on other kernels, over tokens computed together instead of one by
# one. Like every tolerance it is a share of the compared tensor's scale, since rounding errors grow with the values.
FORWARD = 1e-5
# The same of a whole target of these tests: up to seven layers, with weights far larger than a trained model's, amplify
# an error.
TARGET_FORWARD = 1e-4


def assert_close(name: str, got, expected, tolerance: float = EXACT, scale: float | None = None) -> None:
    """Asserts that tensors, or tuples and lists of them however deep, are equal in shape, type and, within `tolerance`,
    in value.

    `tolerance` is a share of `scale`, by default the largest magnitude in `expected`. State the scale where values are
    what is left of larger ones: of a loss that should be 0, the size of its terms.
    """
    if isinstance(expected, (tuple, list)):
        assert type(got) is type(expected), f"{name}: got a {type(got).__name__}, expected a {type(expected).__name__}"
        assert len(got) == len(expected), f"{name}: got {len(got)} parts, expected {len(expected)}"
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            assert_close(f"{name}[{i}]", g, e, tolerance, scale)
        return
    if not isinstance(expected, Tensor):
        assert got == expected, f"{name}: got {got!r}, expected {expected!r}"
        return
    assert isinstance(got, Tensor), f"{name}: got {got!r}, expected a tensor"
    assert got.shape == expected.shape, f"{name}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{name}: got {got.dtype}, expected {expected.dtype}"
    allowed = tolerance * (scale_of(expected) if scale is None else scale) if tolerance else 0.0
    # equal infinities differ by 0, not NaN
    difference = (got.double() - expected.double()).abs().masked_fill(got == expected, 0.0)
    if not (difference <= allowed).all():  # a NaN is never within the tolerance
        worst = torch.unravel_index(difference.nan_to_num(nan=torch.inf).argmax(), difference.shape)
        index = [int(i) for i in worst]
        count = int((~(difference <= allowed)).sum())
        values = f"got {got[tuple(index)].item()}, expected {expected[tuple(index)].item()}"
        raise AssertionError(f"{name}{index}: {values}; {count} of {got.numel()} differ by more than {allowed:g}")


def scale_of(values: Tensor) -> float:
    """Returns the largest magnitude in `values`; infinities and the most negative numbers, which fill masks, do not
    count."""
    magnitudes = values.detach().double().abs().flatten()
    limit = torch.finfo(values.dtype).max / 2 if values.is_floating_point() else torch.inf
    return float(torch.where(magnitudes < limit, magnitudes, 0.0).max()) if magnitudes.numel() else 0.0
