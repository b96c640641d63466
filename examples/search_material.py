"""What `search_recipe.py` trains on and serves: a target's own greedy answers, their states, and three sets of prompts.

N texts, T tokens, n captured states, h width of the target.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import training_files
from pretraining import drawn, token_ids
from search_table import SETS
from torch import Tensor
from train_second_target import headers
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf.demo import HELD_OUT, held_out_file
from eagle31_hf.storage.fingerprints import digest, weights_fingerprint
from eagle31_hf.training.objective import Batch
from eagle31_hf.training.target import TargetReader

LENGTH, PROMPT = 256, 64  # tokens of a text that is trained on, and of its prompt
LONG_PROMPT = 4 * LENGTH  # tokens; with its answer more than a target was trained on
BATCH = 8  # texts of a step
NUM_TEXTS = 420 * BATCH
NUM_PROMPTS, ANSWER = 64, 96  # prompts of a set, and tokens of an answer
NOISE = 0.1  # share of the tokens of a perturbed prompt that are drawn at random
ANSWERED_AT_ONCE, READ_AT_ONCE = 96, 32  # texts
# target -> fields of its drafter; a shallow one of a deep, narrow target
SHAPES: dict[str, dict[str, Any]] = {"demo": {"intermediate_size": 512}, "second": {}}


def texts_of(name: str, held_out: bool) -> list[str]:
    """Returns the text that a target was trained on, or that was held out."""
    if name == "second":
        return headers(held_out)
    return [held_out_file(file) for file in HELD_OUT] if held_out else list(training_files())


def perturbed(prompts: Tensor, vocab_size: int) -> Tensor:
    """Returns prompts (N, T) with a share of their tokens drawn at random."""
    draw = torch.Generator().manual_seed(3)
    others = torch.randint(2, vocab_size, prompts.shape, generator=draw)
    return torch.where(torch.rand(prompts.shape, generator=draw) < NOISE, others, prompts)


@dataclass
class Texts:
    """Texts (N, T) of which all but the first `prompt` tokens are answers, with the target's states (N, T, n*h) and
    last states (N, T, h)."""

    ids: Tensor
    prompt: int
    states: Tensor
    last_states: Tensor

    def batch(self, which: Tensor, is_all: bool = False) -> Batch:
        """Returns the texts `which` (B,); the prompts, too, are to be learnt where `is_all`."""
        ids = self.ids[which]
        answers = (torch.arange(ids.shape[1]) >= (0 if is_all else self.prompt)).expand_as(ids)
        return Batch(ids, answers, torch.ones_like(ids), self.states[which].float(), self.last_states[which].float())


class Material:
    """A target, the texts its drafters learn from, and the answered prompts they are measured on. What takes minutes to
    make is kept in the folder `work`. `num_prompts` of a set, of long ones three for eight others. Texts are of the
    first `num_files` files, or of all. `weights`: a digest of the target and of how much is made of it."""

    def __init__(
        self,
        name: str,
        folder: Path,
        work: Path,
        num_texts: int | None = None,
        num_prompts: int | None = None,
        num_files: int | None = None,
    ):
        self.name, self.work, self.num_files = name, work, num_files
        self.num_texts, self.num_prompts = num_texts or NUM_TEXTS, num_prompts or NUM_PROMPTS
        self.num_long = -(-self.num_prompts * 3 // 8)
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.vocab_size = self.target.config.vocab_size
        sizes = (LENGTH, PROMPT, LONG_PROMPT, self.num_texts, self.num_prompts, self.num_long, ANSWER, NOISE)
        sizes += (num_files,) if num_files else ()
        self.weights = digest(weights_fingerprint(self.target), repr(sizes))[:8]

    def default_layers(self) -> list[int]:
        depth = self.target.config.num_hidden_layers
        return [2, depth // 2, depth - 3]

    def reader(self, layer_ids: list[int]) -> TargetReader:
        return TargetReader(self.target, layer_ids)

    def training_texts(self, kind: str, layer_ids: list[int]) -> Texts:
        """Returns the texts to learn from: `greedy` answers, `sampled` ones, the `files` themselves, or half greedy and
        half of another kind, as in `greedy+files`."""
        kinds = kind.split("+")
        ids = torch.cat([self._texts(each)[i :: len(kinds)] for i, each in enumerate(kinds)])
        return self._with_states(kind, ids, PROMPT, layer_ids)

    def prompt_sets(self, layer_ids: list[int]) -> dict[str, Texts]:
        """Returns the prompts of each of SETS, greedily answered by the target."""
        held_out = token_ids(self.tokenizer, texts_of(self.name, held_out=True))
        plain = drawn(held_out, self.num_prompts, PROMPT, seed=1)
        prompts = (plain, perturbed(plain, self.vocab_size), drawn(held_out, self.num_long, LONG_PROMPT, seed=4))
        found = {}
        for name, chosen in zip(SETS, prompts, strict=True):
            ids = self._kept(f"{name} answered", lambda chosen=chosen: self._continued(chosen, ANSWER))
            found[name] = self._with_states(name, ids, chosen.shape[1], layer_ids)
        return found

    def _texts(self, kind: str) -> Tensor:
        def make() -> Tensor:
            files = token_ids(self.tokenizer, texts_of(self.name, held_out=False)[: self.num_files])
            texts = drawn(files, self.num_texts, LENGTH, seed=0)
            if kind == "files":
                return texts
            return self._continued(texts[:, :PROMPT], LENGTH - PROMPT, do_sample=kind == "sampled")

        return self._kept(kind, make)

    @torch.no_grad()
    def _continued(self, prompts: Tensor, length: int, do_sample: bool = False) -> Tensor:
        torch.manual_seed(0)
        found = []
        for chunk in prompts.split(ANSWERED_AT_ONCE):
            options = {"max_new_tokens": length, "eos_token_id": None, "do_sample": do_sample, "top_k": 0}
            found.append(self.target.generate(chunk, attention_mask=torch.ones_like(chunk), **options))
            print(f"answered {sum(map(len, found))} of {len(prompts)}", flush=True)
        return torch.cat(found)

    def _with_states(self, name: str, ids: Tensor, prompt: int, layer_ids: list[int]) -> Texts:
        def make() -> tuple[Tensor, Tensor]:
            reader = self.reader(layer_ids)
            parts = [reader.read(part, torch.ones_like(part)) for part in ids.split(READ_AT_ONCE)]
            states, last = (torch.cat(column) for column in zip(*parts, strict=True))
            return states.half(), last  # half the memory

        states, last = self._kept(f"{name} states {'-'.join(map(str, layer_ids))}", make)
        return Texts(ids, prompt, states, last)

    def _kept(self, what: str, make: Any) -> Any:
        """Returns what a file keeps, or makes it now."""
        file = self.work / f"{self.name} {self.weights} {what}.pt".replace(" ", "-")
        if not file.exists():
            made, new = make(), file.with_name(f"{file.name}.{os.getpid()}")
            torch.save(made, new)
            new.replace(file)
        return torch.load(file, weights_only=True, mmap=True)
