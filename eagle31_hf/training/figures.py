"""The figures of training between two logs."""

from time import monotonic

import torch
from accelerate import Accelerator
from torch import Tensor

from .objective import means_of


class TrainingFigures:
    """Adds up the figures of batches on their device, counts tokens, and texts that are left out because the target
    gives them states that are NaN or infinite."""

    def __init__(self, device: torch.device):
        self._sums: Tensor | None = None
        self._num_tokens, self._began = 0, 0.0
        self._waited = 0.0  # since the last call of `take`
        self._taken_at: float | None = None
        self._num_broken = torch.zeros((), device=device)

    def add(self, sums: Tensor) -> None:
        """Adds the sums of a batch, see `UnrollRecord.sums`."""
        self._sums = sums if self._sums is None else self._sums + sums

    def begin(self, documents: Tensor) -> None:
        """Counts the tokens of a batch (B, T) that is about to be trained on, padding (0) left out."""
        if not self._num_tokens:
            self._began = monotonic()
        self._num_tokens += int(documents.count_nonzero())

    def add_waiting(self, seconds: float) -> None:
        """Adds the seconds for which a step's batches were waited for."""
        if self._taken_at is None:  # the first batches are read when nothing else is to be done
            self._taken_at = monotonic()
        else:
            self._waited += seconds

    def add_broken(self, count: Tensor) -> None:
        """Adds to the number of texts that are left out, which counts from the start of the run."""
        self._num_broken += count

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns the means since the last call over all processes, by depth (`accuracy_1` is of the first drafted
        token), the tokens trained on a second, what came before the first batch left out, the share of this process's
        time in which it waited for data, and the number of texts left out, if there were any."""
        if self._sums is None:
            return {}
        means = means_of(accelerator.reduce(self._sums, "sum").cpu())
        self._sums = None
        logs = {f"{name}_{k + 1}": round(value, 5) for name, values in means.items() for k, value in enumerate(values)}
        num_tokens = int(accelerator.reduce(torch.tensor(self._num_tokens, device=accelerator.device), "sum"))
        now = monotonic()
        logs["tokens_per_second"] = round(num_tokens / max(1e-9, now - self._began), 1)
        logs["waiting_for_data"] = round(self._waited / max(1e-9, now - (self._taken_at or now)), 4)
        self._num_tokens, self._waited = 0, 0.0
        self._taken_at = now
        num_broken = int(accelerator.reduce(self._num_broken.clone(), "sum"))
        return logs | ({"texts_with_broken_states": num_broken} if num_broken else {})
