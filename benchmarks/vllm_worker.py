"""vLLM in a process of its own, by any Python that has it (0.32 or later): it decodes prompts, and tells what was
accepted.

    python vllm_worker.py < requests

Imports nothing of this library. The first line of stdin is how the engine is started, as JSON: `target` (a folder or a
Hub repository), `speculation` (vLLM's `speculative_config`; null: no drafter), `dtype`, `max_model_len`,
`max_num_seqs`. It is answered by a line on stdout with `versions`. Each further line is a request: `prompts`, a list of
lists of token ids, which are decoded at once, `max_new_tokens`, `sampling` (a temperature, 0: greedy, and more),
`seed`, `ends`, the ids that end a text. It is answered by a line with `seconds`, and by prompt `tokens`, the new ids,
and `drafted` and `accepted`, counts of every round. An error is a line with `error`. What libraries print goes to
stderr.
"""

import json
import os
import sys
import time
from importlib.util import find_spec
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB


def start(plan: dict[str, Any]) -> Any:
    """Starts the engine."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'")
    import torch

    has_gpu = torch.cuda.is_available()
    for name, value in (ENVIRONMENT if has_gpu else ENVIRONMENT | ON_A_CPU).items():
        os.environ.setdefault(name, value)
    from vllm import LLM  # reads the environment when it is imported

    drafting: dict[str, Any] = {}
    if plan["speculation"] is not None:
        drafting = {"speculative_config": plan["speculation"], "per_request_spec_decode_metrics": "detailed"}
    return LLM(
        model=plan["target"],
        dtype=plan["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=plan["max_num_seqs"],
        max_model_len=plan["max_model_len"],
        disable_log_stats=False,
        **drafting,
    )


def decode(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Decodes the prompts of a request at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        **request["sampling"],
        max_tokens=request["max_new_tokens"],
        seed=request["seed"],
        ignore_eos=True,
        stop_token_ids=request["ends"],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    began = time.perf_counter()
    outputs = [each.outputs[0] for each in engine.generate(prompts, sampling, use_tqdm=False)]
    seconds = time.perf_counter() - began
    rounds = [getattr(output, "spec_decode_metrics", None) for output in outputs]
    return {
        "seconds": seconds,
        "tokens": [list(output.token_ids) for output in outputs],
        "drafted": [[] if found is None else list(found.per_step_drafted) for found in rounds],
        "accepted": [[] if found is None else list(found.per_step_accepted) for found in rounds],
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be among the answers
    engine = None
    for line in sys.stdin:
        try:
            if engine is None:
                engine = start(json.loads(line))
                import torch
                import vllm

                answer: dict[str, Any] = {"versions": {"vllm": vllm.__version__, "torch": torch.__version__}}
            else:
                answer = decode(engine, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
