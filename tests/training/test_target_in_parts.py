"""A target that does not fit: two processes read their parts of it, and run it, in less memory than it has weights."""

import ctypes
import platform
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from letters import build_tokenizer, conversations, write_data
from programs import in_two_processes
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from eagle31_hf.targets.layers import target_states
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import prepare_data
from eagle31_hf.training.store import HiddenStateStore
from eagle31_hf.training.target import TargetReader

LAYERS, IDS = [1, 5, 9], [1, 2, 3, 5, 8, 13, 21, 34]
WAYS = {"parts": {"fsdp_size": 2}, "tensor parallel": {"tp_plan": "auto"}}
PREPARED = PreparationOptions(regenerate=True, states=True, max_length=48, max_new_tokens=4)
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Memory:
    """The most memory of its own, without files that are read, that this process takes in a `with` block."""

    def __enter__(self) -> "Memory":
        self._begin, self.peak, self._is_over = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, self._now() - self._begin)

    @staticmethod
    def _now() -> int:
        with open("/proc/self/status") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def read_in_parts_and_whole(folder: Path, spread: dict[str, Any]) -> None:
    """By each of two processes: notes a state of the text and how much memory it took at most; in parts they make a
    store, too."""
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):  # what is freed is given back at once, not kept by malloc
        ctypes.CDLL("libc.so.6").mallopt(option, 2**16)
    dist.init_process_group("gloo")
    found = {}
    for way, options in {"parts": {"distributed_config": DistributedConfig(**spread)}, "whole": {}}.items():
        dist.barrier()
        with Memory() as memory:
            target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
            states, _ = TargetReader(target, LAYERS).of_texts([torch.tensor(IDS)])[0]
            if way == "parts":
                prepare_data(target, build_tokenizer(), str(folder / "data.jsonl"), folder / "store", PREPARED)
            found[way] = {"peak": memory.peak, "state": states[-1].clone()}
        del target
    torch.save(found, folder / f"found-{dist.get_rank()}.pt")


def own_states(rank: int) -> torch.Tensor:
    return torch.randn(3, 24, generator=torch.Generator().manual_seed(rank))


def score_own_states(folder: Path) -> None:
    dist.init_process_group("gloo")
    spread = DistributedConfig(tp_plan="auto")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=spread).eval()
    scores = TargetReader(target, [0, 1, 2]).logits(own_states(dist.get_rank()))
    torch.save(scores, folder / f"scores-{dist.get_rank()}.pt")


def test_each_process_scores_its_own_states_where_the_head_alone_is_split(tmp_path):
    """A tensor-parallel GPT-NeoX, whose embedding every process has."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    target = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=64, bos_token_id=None, eos_token_id=None, **sizes)).eval()
    target.save_pretrained(tmp_path)
    in_two_processes(tmp_path, score_own_states, tmp_path)
    for rank in (0, 1):
        expected = target.get_output_embeddings()(own_states(rank))
        torch.testing.assert_close(torch.load(tmp_path / f"scores-{rank}.pt"), expected)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists() or platform.libc_ver()[0] != "glibc",
    reason="reads its memory from Linux' process file system, and has glibc give back at once what is freed",
)
@pytest.mark.parametrize("how", WAYS)
def test_two_processes_run_what_neither_has_room_for(tmp_path, how):
    """They read a text, and make a store of answers and states. A checkpoint in bf16 is read in fp32: whole, its 269 MB
    are memory of the process, and no file's."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **SIZES)).bfloat16()
    target.save_pretrained(tmp_path)
    write_data(tmp_path / "data.jsonl", conversations(2))
    in_two_processes(tmp_path, read_in_parts_and_whole, tmp_path, WAYS[how])
    target = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    size = sum(weight.nbytes for weight in target.parameters())
    expected, _ = target_states(target, torch.tensor([IDS]), LAYERS)
    for found in (torch.load(tmp_path / f"found-{rank}.pt") for rank in (0, 1)):
        for way in ("parts", "whole"):
            torch.testing.assert_close(found[way]["state"], expected[0, -1])
        assert found["parts"]["peak"] < 0.8 * size
    assert len(HiddenStateStore(tmp_path / "store")) > 0
