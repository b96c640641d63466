"""Our side of `compare_training.py`: the drafter and `DraftingObjective`, by the plain loop of `training_side.py`."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from training_side import Side, arguments, load_tensors, serve

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.training.loss_mask import loss_denominators
from eagle31_hf.training.objective import Batch, DraftingObjective, Settings, means_of


class Ours(Side):
    library = "eagle31_hf"

    def __init__(self, workspace: Path, batching: str):
        super().__init__(workspace, batching)
        self.data = load_tensors(workspace / "data.safetensors", ("input_ids", "states", "last_states"))
        parts = load_tensors(workspace / "target.safetensors", ("embedding", "head"))
        self.model = Eagle31DrafterModel.from_pretrained(workspace / "initial", dtype=torch.float32).train()
        self.model.set_input_embeddings(nn.Embedding.from_pretrained(parts["embedding"], freeze=True))
        self.model.lm_head.requires_grad_(False)  # speculators never trains it
        depth, decay = self.plan["depth"], self.plan["decay"]

        def logits_of(last_states: Tensor) -> Tensor:
            return linear(last_states, parts["head"])

        settings = Settings(depth, tuple(decay**k for k in range(depth)), {"kl": 1.0})
        self.objective = DraftingObjective(self.model, settings, logits_of)

    def part(self, sequences: list[int]) -> Batch:
        ids = self.data["input_ids"][sequences]
        answers, documents = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids)
        return Batch(ids, answers, documents, self.data["states"][sequences], self.data["last_states"][sequences])

    def batch(self, sequences: list[int]) -> list[Batch]:
        """Returns what to run forward and backward before a step."""
        return [self.part(sequences)] if self.batching == "whole" else [self.part([sequence]) for sequence in sequences]

    def backward(self, batch: list[Batch]) -> float:
        settings, total = self.objective.settings, 0.0
        ways = settings.depth, settings.convention, settings.normalisation
        shares = sum(loss_denominators(part.answers, part.documents, *ways) for part in batch)
        for part in batch:
            loss = self.objective(part, shares)["loss"]
            loss.backward()
            total += loss.item()
        return total

    def exact_losses(self, sequences: list[int]) -> list[float]:
        result = self.objective(self.part(sequences))
        result["loss"].backward()
        return means_of(result["sums"])["distance"]

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


if __name__ == "__main__":
    args = arguments(__doc__).parse_args()
    serve(Ours(args.workspace, args.batching))
