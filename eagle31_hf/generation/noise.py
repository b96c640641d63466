"""Random numbers for sampled tokens: each sequence has its own, so that no text depends on its neighbours in the batch.

A token is drawn as the argmax of log-probability plus Gumbel noise. *Coupled* noise belongs to a slot of the text: the
drafter guesses with the noise the target will draw with (arXiv 2408.07978), and whatever is drafted, the text is a
function of seed and target alone.

B sequences, V target vocabulary.
"""

import torch
from torch import Tensor


class Noise:
    """Random numbers for B sequences, seeded once from torch's global generator. `is_coupled`: the noise of a slot is
    the same whenever it is asked for; `first_slot`: the first that is drawn, the same in every sequence."""

    def __init__(
        self, num_sequences: int, vocab_size: int, device: torch.device, is_coupled: bool, first_slot: int = 0
    ):
        seed = int(torch.randint(2**48, (), device="cpu"))
        self.generators = [torch.Generator(device).manual_seed(seed + b) for b in range(num_sequences)]
        self.vocab_size = vocab_size
        self.device = device
        self.is_coupled = is_coupled
        self._noise: list[dict[int, Tensor]] = [{} for _ in range(num_sequences)]
        self._next = [first_slot] * num_sequences  # the first slot of a sequence whose noise has not been drawn

    def gumbel(self, b: int) -> Tensor:
        """Fresh noise (V,)."""
        noise = torch.empty(self.vocab_size, dtype=torch.float32, device=self.device)
        return noise.exponential_(generator=self.generators[b]).log_().neg_()

    def of_slot(self, b: int, slot: int) -> Tensor:
        """The noise (V,) of a slot that is not forgotten yet."""
        while self._next[b] <= slot:  # in the order of the text, whoever asks first
            self._noise[b][self._next[b]] = self.gumbel(b)
            self._next[b] += 1
        return self._noise[b][slot]

    def forget(self, lengths: list[int]) -> None:
        """Drops the noise of tokens that are committed: sequence b up to slot `lengths[b]`."""
        for noise, length in zip(self._noise, lengths, strict=True):
            for slot in [slot for slot in noise if slot < length]:
                del noise[slot]

    def at(self, b: int, slot: int) -> Tensor:
        """The noise (V,) that the token of a slot is drawn with: fresh unless coupled."""
        return self.of_slot(b, slot) if self.is_coupled else self.gumbel(b)

    def uniforms(self, b: int, count: int) -> Tensor:
        """Numbers (count,) in [0, 1)."""
        return torch.rand(count, generator=self.generators[b], device=self.device)

    def pick(self, b: int, slot: int, log_weights: Tensor) -> Tensor:
        """A token (1,) with the chances softmax(log_weights (1, V))."""
        return (log_weights + self.at(b, slot)).argmax(-1)
