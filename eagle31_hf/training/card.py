"""The model card of a drafter in training: what it says of the run."""

from pathlib import Path
from typing import Any

from transformers.trainer_utils import SchedulerType

from ..hub import CARD, render_card
from ..modeling import Eagle31DrafterModel


def note_training(trainer: Any) -> None:
    """Adds to the facts of the drafter's card how far a `CheckpointingTrainer` has trained it, and how; of the
    best checkpoint's weights, how far those were."""
    args, state = trainer.args, trainer.state
    step = state.global_step if trainer.saved_step is None else trainer.saved_step
    facts, reach = trainer.drafter.card_facts.training, trainer.position_reach
    batch = trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size
    facts |= {
        "Steps": f"{step:,} of {batch} sequences of up to {args.max_length:,} tokens"
        f"{f', positions spread up to {reach:,}' if reach else ''}",
        "Loss": f"{args.loss}, {args.depth} deep, normalised by {args.normalisation},"
        f" {'of all tokens, prompts too' if args.train_prompts else f'loss mask: {args.loss_mask}'}",
        "Optimizer": f"{trainer.trained_by()}, {SchedulerType(args.lr_scheduler_type).value}",
    }
    logged = (entry for entry in reversed(state.log_history) if entry["step"] <= step)
    evaluated = next((entry for entry in logged if "eval_accepted_length" in entry), None)
    if evaluated is not None:
        facts["Accepted length"] = (
            f"{evaluated['eval_accepted_length']:.2f} a target forward, walking the answers held out,"
            f" {args.eval_settings().depth} deep"
        )


def write_card(folder: Path, drafter: Eagle31DrafterModel, name: str | None) -> None:
    """Writes the drafter's card into a folder. `name`: its repository's, by default the folder's."""
    config: Any = drafter.config
    card = render_card(config, drafter.card_facts, name or folder.resolve().name)
    (folder / CARD).write_text(card, encoding="utf-8")
