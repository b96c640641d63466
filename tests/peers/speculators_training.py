"""speculators' side of `compare_training.py`: its drafter, shift, collator, unroll and loss, by the plain loop of
`training_side.py`.

Runs in an environment of its own, see `speculators_fixtures.py`. On a CPU it can train with attention `sdpa` (flex
attention has no backward pass there) and with the loss `eager` (`fused` is Triton), and leaves out `torch.compile`.

`--batching whole` is what its trainer does: it packs all sequences into one, told apart by document ids. `sequences`
spares it the attention between them, which on a CPU it computes and masks.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from training_side import Side, arguments, load_tensors, serve
from transformers import LlamaConfig

SAME_NAME = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
ATTENTION, LOSS = "sdpa", "eager"


def model_like(config: dict, depth: int) -> Eagle3DraftModel:
    """Builds speculators' drafter in the shape that our `config.json` describes."""
    layer_config = LlamaConfig(**{name: config[name] for name in SAME_NAME})
    layer_config._attn_implementation = ATTENTION
    return Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer_config,
            draft_vocab_size=config["draft_vocab_size"],
            eagle_aux_hidden_state_layer_ids=config["aux_hidden_state_layer_ids"],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depth)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
            **{flag: config[flag] for flag in FLAGS},
        )
    )


def fill(model: Eagle3DraftModel, initial: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Fills in our first weights, and the target's. Raises ValueError for any that is left as it was."""
    weights = initial | {
        "embed_tokens.weight": target["embedding"],
        "verifier_lm_head.weight": target["head"],
        "verifier_norm.weight": target["norm"],
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ValueError(
            f"speculators' drafter lacks {unexpected} and was not given {missing}; expected the same names on both"
            " sides."
        )


class Theirs(Side):
    library = "speculators"

    def __init__(self, workspace: Path, batching: str):
        super().__init__(workspace, batching)
        self.data = load_tensors(workspace / "data.safetensors", ("input_ids", "states", "before_norm"))
        target = load_tensors(workspace / "target.safetensors", ("embedding", "head", "norm"))
        config = json.loads((workspace / "initial" / "config.json").read_text())
        self.model = model_like(config, self.plan["depth"]).train()
        fill(self.model, load_file(workspace / "initial" / "model.safetensors"), target)
        self.options = {
            "ttt_steps": self.plan["depth"],
            "ttt_step_loss_decay": self.plan["decay"],
            "loss_config": resolve_loss_config("kl_div", LOSS),
        }

    def start(self) -> None:
        """Makes speculators' own optimizers, where the plan has settings for them."""
        super().start()
        if "optimizers" in self.plan:
            self.optimizers = build_optimizers(self.model, SimpleNamespace(**self.plan["optimizers"]))

    def sample(self, sequence: int, last_counts: bool = True) -> dict[str, Tensor]:
        """A sequence as speculators' data set hands it out. It also predicts what follows the last token, we do not."""
        ids = self.data["input_ids"][sequence]
        mask = torch.arange(len(ids)) >= self.plan.get("prompt", 0)
        mask[-1] = last_counts
        return {
            "input_ids": ids,
            "hidden_states": self.data["states"][sequence],
            "verifier_last_hidden_states": self.data["before_norm"][sequence],
            "loss_mask": mask,
            "lengths": torch.tensor([len(ids)]),
            "position_ids": torch.arange(len(ids)),
        }

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        length = sum(len(sample["input_ids"]) - 1 for sample in samples)
        hidden_size = self.model.hidden_size
        collated = CollateFn(length, hidden_size, dtype=torch.float32, preprocess=shift_batch)(samples)
        return {name: value for name, value in collated.items() if isinstance(value, Tensor)}

    def batch(self, sequences: list[int]) -> list[dict[str, Tensor]]:
        """Returns what to run forward and backward before a step."""
        samples = [self.sample(sequence) for sequence in sequences]
        return [self.collate(samples)] if self.batching == "whole" else [self.collate([sample]) for sample in samples]

    def backward(self, batch: list[dict[str, Tensor]]) -> float:
        total = 0.0
        for part in batch:
            _, loss, _ = self.model(**part, **self.options)
            (loss / len(batch)).backward()
            total += loss.item() / len(batch)
        return total

    def exact_losses(self, sequences: list[int]) -> list[float]:
        """Sequence by sequence: packed, it also counts predictions of tokens of the next document."""
        depth, decay = self.plan["depth"], self.plan["decay"]
        losses = torch.zeros(depth)
        for sequence in sequences:
            _, loss, metrics = self.model(**self.collate([self.sample(sequence, last_counts=False)]), **self.options)
            (loss / len(sequences)).backward()
            losses += torch.stack([metrics[f"loss_{k}_sum"] / decay**k for k in range(depth)]) / len(sequences)
        return losses.tolist()

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


if __name__ == "__main__":
    args = arguments(__doc__).parse_args()
    serve(Theirs(args.workspace, args.batching))
