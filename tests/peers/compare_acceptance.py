"""Accepted tokens by position, ours beside vLLM's, for the same prompts (greedy, fp32), in every form vLLM takes a
drafter in.

    python tests/peers/compare_acceptance.py --vllm-python PYTHON_WITH_VLLM [--prompts 4] [--max-new-tokens 64]

For each of DRAFTERS and each depth: the native folder (eagle31_hf is installed beside vLLM, whose plug-in reads it) and
the exports for vLLM and for speculators. How to install vLLM stands in `vllm_counts.py`. Exit status 1 where a count
differs.

vLLM always drafts to full depth and counts a text's last round whole, past the length limit too; so we decode a little
further and count the rounds that begin before the limit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from eagle31_hf import Eagle31Config, Eagle31DrafterModel, demo, export_checkpoint, track_acceptance

HERE = Path(__file__).parent
TWO_LAYERS = "two layers"
DRAFTERS = (*demo.DRAFTERS, TWO_LAYERS)
EXPORTS = ("vllm", "speculators")
FORMS = ("native", *EXPORTS)
VARIANT = {
    "num_hidden_layers": 2, "layer_types": None, "qk_norm": True, "draft_vocab_size": 1536, "initializer_range": 0.05,
    "share_target_embeddings": False,
}  # fmt: skip


def two_layers(target) -> Eagle31DrafterModel:
    """The EAGLE 3.1 drafter made into what differs most from it and still drafts well.

    A second layer of seeded weights, q/k norms, a table of its own, and three quarters of the vocabulary in no order.
    """
    base = demo.load_drafter("eagle31")
    fields = {name: getattr(base.config, name) for name in Eagle31Config.__annotations__}
    torch.manual_seed(0)
    drafter = Eagle31DrafterModel(Eagle31Config(**fields | VARIANT)).eval()
    weights = base.state_dict()
    ids = torch.randperm(base.config.vocab_size)[: drafter.config.draft_vocab_size]
    weights["lm_head.weight"] = weights["lm_head.weight"][ids]
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight
    drafter.load_state_dict(weights, strict=False)
    drafter.set_draft_vocabulary(ids)
    return drafter


def folders(name: str, target, workspace: Path) -> dict[str, Path]:
    """The drafter's folder in each of FORMS."""
    native = demo.FOLDER / name
    if name == TWO_LAYERS:
        native = workspace / "native"
        two_layers(target).save_pretrained(native)
    return {"native": native} | {form: export_checkpoint(native, workspace / form, format=form) for form in EXPORTS}


def our_counts(target, drafter, prompts, depth: int, max_new_tokens: int) -> dict:
    """Counts accepted and drafted tokens by position over the rounds that begin with fewer than `max_new_tokens`
    tokens."""
    accepted = [0] * depth
    drafts = 0
    texts = []
    for prompt in prompts:
        with track_acceptance() as stats:
            sequence = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=drafter,
                num_assistant_tokens=depth,
                max_new_tokens=max_new_tokens + depth + 1,
                do_sample=False,
                eos_token_id=None,
            )
        generated = 1
        for accepted_len in stats.accepted_per_round:
            if generated >= max_new_tokens:
                break
            generated += accepted_len + 1
            drafts += 1
            for position in range(accepted_len):
                accepted[position] += 1
        texts.append(sequence[0, prompt.shape[1] :][:max_new_tokens].tolist())
    return {"drafts": drafts, "accepted_per_position": accepted, "tokens": texts}


def vllm_counts(python: str, folder: Path, prompts, depth: int, max_new_tokens: int) -> dict:
    """Returns the same, counted by vLLM in a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([prompt[0].tolist() for prompt in prompts], file)
        file.flush()
        command = [
            python,
            HERE / "vllm_counts.py",
            "--target",
            demo.FOLDER / "target",
            "--drafter",
            folder,
            "--prompts",
            file.name,
            "--num-speculative-tokens",
            str(depth),
            "--max-new-tokens",
            str(max_new_tokens),
            "--json",
        ]
        environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())} | os.environ
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        raise RuntimeError(f"vLLM ended with status {run.returncode} on {folder}:\n{run.stderr[-4000:]}")
    result = json.loads(run.stdout.strip().splitlines()[-1])
    return {key: result[key] for key in ("drafts", "accepted_per_position", "tokens")}


def compare(target, prompts, name: str, args: argparse.Namespace) -> bool:
    """Prints the lines of one drafter; returns whether all are identical."""
    same = True
    with tempfile.TemporaryDirectory() as workspace:
        by_form = folders(name, target, Path(workspace))
        drafter = Eagle31DrafterModel.from_pretrained(by_form["native"], dtype=torch.float32).eval()
        for depth in args.depths:
            ours = our_counts(target, drafter, prompts, depth, args.max_new_tokens)
            for form in args.forms:
                vllm = vllm_counts(args.vllm_python, by_form[form], prompts, depth, args.max_new_tokens)
                same &= ours == vllm
                shown = [f"{c['drafts']}: {' '.join(map(str, c['accepted_per_position']))}" for c in (ours, vllm)]
                print(
                    f"| {name} | {depth} | {form} | {' | '.join(shown)} | {'yes' if ours == vllm else 'no'} |",
                    flush=True,
                )
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--depths", nargs="+", type=int, default=(3, 7))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    target, tokenizer = demo.load_target()
    prompts = demo.prompts(tokenizer, args.prompts)
    print("| drafter | K | form | ours, drafts: accepted at 1 to K | vLLM | identical |\n|---|---|---|---|---|---|")
    identical = [compare(target, prompts, name, args) for name in args.drafters]
    return 0 if all(identical) else 1


if __name__ == "__main__":
    sys.exit(main())
