"""Trains on the states of vLLM's own servers, and beside the target: the same losses, step by step, also where a server
is killed. A second opinion on what `extract_hidden_states` gives, of which layer, and when.

Run by hand; how vLLM is installed on a CPU stands in `vllm_counts.py`.

    python tests/peers/vllm_states.py --vllm-python PYTHON [--dtype float32] [--steps 12] [--work work]

It prints, and writes to tests/peers/results/vllm_states.json: how far the states of texts are from transformers' (the
largest difference, in standard deviations), the losses of each way, tokens a second, and versions.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import transformers

from eagle31_hf import Eagle31Trainer, Eagle31TrainingArguments, demo
from eagle31_hf.cli.loading import load_causal_lm, load_outline, load_tokenizer
from eagle31_hf.training.engine_states import StreamedStates, engine_states, options_of_server
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import prepare_data
from eagle31_hf.training.servers import EngineOptions
from eagle31_hf.training.store import HiddenStateStore
from eagle31_hf.training.target import TargetReader

TARGET, LAYERS = str(demo.FOLDER / "target"), [2, 12, 21]
LENGTH, TEXTS = 512, 40
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "PYTHONPATH": str(Path(__file__).parent),
}


def main() -> None:
    args = arguments()
    texts = args.work / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": text}) for text in demo_texts()))
    target = load_causal_lm(TARGET, dtype=getattr(torch, args.dtype))
    options = PreparationOptions(max_length=LENGTH)
    prepare_data(target, load_tokenizer(TARGET), str(texts), args.work / "tokens", options)
    examples = HiddenStateStore(args.work / "tokens")
    found = {"dtype": args.dtype, "versions": versions(args.vllm_python)}
    found["beside the target"] = trained(target, examples, args, target)
    with ExitStack() as stack:
        servers = [stack.enter_context(served(args)) for _ in range(2)]
        engine = EngineOptions(tuple(url for url, _ in servers), tries=60, longest_pause=2.0)
        outline = load_outline(TARGET, dtype=args.dtype)
        source = engine_states(outline, engine, LAYERS, LENGTH, print)
        source.compare(target)
        found["off by"] = off_by(source, TargetReader(target, LAYERS), examples)
        streamed = StreamedStates(examples, source)
        found["by two servers"] = trained(source.ends, streamed, args)
        killing = threading.Timer(2.0, os.killpg, (servers[1][1].pid, signal.SIGKILL))
        killing.start()
        found["one of them killed"] = trained(source.ends, streamed, args)
    found["files left"] = len([*args.work.glob("states/*")])
    text = json.dumps(found, indent=1)
    print(text)
    Path(__file__).parent.joinpath("results", "vllm_states.json").write_text(text + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--work", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args()
    (args.work / "states").mkdir(parents=True, exist_ok=True)
    return args


def demo_texts() -> list[str]:
    """Texts of Python, as the demo's target was trained on."""
    code = Path(argparse.__file__).read_text()
    return [code[start : start + 900] for start in range(0, 900 * TEXTS, 900)]


@contextmanager
def served(args: argparse.Namespace):
    """The address and the process of a server of vLLM that gives the states."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    num_layers = load_outline(TARGET).config.num_hidden_layers
    states = options_of_server([*LAYERS, num_layers], str(args.work / "states"))
    states = states.replace('"ExampleHiddenStatesConnector"', '"OnCpu", "kv_connector_module_path": "vllm_cpu_states"')
    line = f"exec {args.vllm_python} -m vllm.entrypoints.openai.api_server --model {TARGET} --dtype {args.dtype}"
    line += f" --enforce-eager --max-model-len {LENGTH + 1} --port {port}{states}"
    with open(args.work / f"{port}.log", "w") as log:
        process = subprocess.Popen(
            ["bash", "-c", line], stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    try:
        while process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        if process.poll() is not None:
            sys.exit(f"vLLM did not start: {args.work / f'{port}.log'}")
        yield f"http://127.0.0.1:{port}", process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def off_by(source, reader: TargetReader, examples) -> float:
    """Returns the largest difference of a state from transformers', in standard deviations of these states."""
    texts = [examples[i]["input_ids"] for i in range(8)]
    pairs = zip(source.of_texts(texts), reader.of_texts(texts), strict=True)
    return max(
        float((theirs - ours).abs().max() / ours.std()) for pair in pairs for theirs, ours in zip(*pair, strict=True)
    )


def trained(ends, examples, args: argparse.Namespace, target=None) -> dict:
    settings = Eagle31TrainingArguments(
        str(args.work / "drafter"),
        max_length=LENGTH,
        depth=2,
        max_steps=args.steps,
        logging_steps=1,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Eagle31Trainer(new_drafter(ends, aux_hidden_state_layer_ids=LAYERS), settings, examples, target=target)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [round(entry["loss"], 4) for entry in logs],
        "tokens_per_second": round(sum(entry["tokens_per_second"] for entry in logs) / len(logs)),
    }


def versions(python: str) -> dict[str, str]:
    code = "import vllm, torch, transformers; print(vllm.__version__, torch.__version__, transformers.__version__)"
    theirs = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-3:]
    ours = {"torch": torch.__version__, "transformers": transformers.__version__}
    return ours | dict(zip(("vllm", "its torch", "its transformers"), theirs, strict=True))


if __name__ == "__main__":
    main()
