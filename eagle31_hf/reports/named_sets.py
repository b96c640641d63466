"""Sets of prompts of the Hub that go by a short name."""

from pathlib import Path

# name: (dataset as `read_records` takes it, split)
NAMED_SETS = {
    # 880 questions of 11 kinds, of which 386 are in the dataset itself
    "speed-bench": ("nvidia/SPEED-Bench:qualitative", "test"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", "train"),  # 80 questions of 8 kinds, the first turns
    "humaneval": ("openai/openai_humaneval", "test"),  # 164 functions of Python to complete
    "gsm8k": ("openai/gsm8k:main", "test"),  # 1,319 word problems
    "longbench": ("zai-org/LongBench-v2", "train"),  # 503 questions about texts of 8k to 2M words
}
# Stands in SPEED-Bench in place of prompts that have another licence; NVIDIA's prepare_data.py (Model-Optimizer,
# examples/specdec_bench) fetches these, and its files can be read here.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


def resolved(name: str, split: str | None) -> tuple[str, str]:
    """Returns what `read_records` takes for a named set, file, folder or dataset: its source and split. A file or
    folder of the name of a set goes first."""
    dataset, its_split = (name, "train") if Path(name).exists() else NAMED_SETS.get(name, (name, "train"))
    return dataset, split or its_split
