"""Where a sampled token comes from: random numbers of each row's own, so that no row's text depends on its neighbours.

A token is drawn as the argmax of log-probability plus Gumbel noise. *Coupled* noise belongs to a slot of the text: the
drafter guesses with the noise the target will draw with (arXiv 2408.07978), and whatever is drafted, the text is a
function of seed and target alone.
"""

import torch
from torch import Tensor


class Draws:
    """Random numbers for B rows, seeded once from torch's global generator. `is_coupled`: a slot's noise is the same
    whenever asked for."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, is_coupled: bool):
        seed = int(torch.randint(2**48, ()))
        self.generators = [torch.Generator(device).manual_seed(seed + row) for row in range(num_rows)]
        self.vocab_size = vocab_size
        self.device = device
        self.is_coupled = is_coupled
        self._noise: list[dict[int, Tensor]] = [{} for _ in range(num_rows)]
        self._next = [0] * num_rows  # the first slot of a row whose noise has not been drawn

    def start(self, slot: int) -> None:
        """The first slot to be drawn, the same in every row."""
        self._next = [slot] * len(self._next)

    def gumbel(self, row: int) -> Tensor:
        """Fresh noise (V,)."""
        noise = torch.empty(self.vocab_size, device=self.device)
        return noise.exponential_(generator=self.generators[row]).log_().neg_()

    def noise(self, row: int, slot: int) -> Tensor:
        """The noise (V,) of a slot not yet forgotten."""
        while self._next[row] <= slot:  # in the order of the text, whoever asks first
            self._noise[row][self._next[row]] = self.gumbel(row)
            self._next[row] += 1
        return self._noise[row][slot]

    def forget(self, lengths: list[int]) -> None:
        """Row b is committed up to slot `lengths[b]`."""
        for noise, length in zip(self._noise, lengths, strict=True):
            for slot in [slot for slot in noise if slot < length]:
                del noise[slot]

    def uniform(self, row: int) -> Tensor:
        return torch.rand((), generator=self.generators[row], device=self.device)

    def pick(self, row: int, slot: int, log_weights: Tensor) -> Tensor:
        """A token (1,) with the chances softmax(log_weights (1, V))."""
        noise = self.noise(row, slot) if self.is_coupled else self.gumbel(row)
        return (log_weights + noise).argmax(-1)
