"""Run by two processes: reads a target in parts, then whole, and prints a state of its text and how much memory each
took at most."""

import ctypes
import json
import sys
import threading

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from eagle31_hf.training.target import TargetReader

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


def main(folder: str, layers: str, ids: str) -> None:
    torch.set_num_threads(1)
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):  # what is freed is given back at once, not kept by malloc
        ctypes.CDLL("libc.so.6").mallopt(option, 2**16)
    dist.init_process_group("gloo")
    found = {}
    for way, options in {"parts": {"distributed_config": DistributedConfig(fsdp_size=2)}, "whole": {}}.items():
        dist.barrier()
        with Memory() as memory:
            target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
            states, _ = TargetReader(target, json.loads(layers)).of_texts([torch.tensor(json.loads(ids))])[0]
            found[way] = {"peak": memory.peak, "state": states[-1].tolist()}
        del target
    everywhere = [None, None]
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        print(json.dumps(everywhere), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
