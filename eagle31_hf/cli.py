"""`eagle31`: one table, command -> function. Exit status 0; 1: something failed; 2: the user's input was at fault."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

DEPTHS = (3, 5, 7)


def progress(message: str) -> None:
    print(f"eagle31: {message}", file=sys.stderr, flush=True)


def demo(args: argparse.Namespace) -> int:
    from . import demo as pair
    from .bench import measure

    progress("loading the demo pair")
    target, tokenizer = pair.load_target(args.device)
    drafters = {name: pair.load_drafter(name, args.device) for name in pair.DRAFTERS}
    prompts = [prompt.to(args.device) for prompt in pair.prompts(tokenizer, args.prompts)]
    if not args.json:
        _show_completion(target, tokenizer, drafters["eagle31"], prompts[0], args.max_new_tokens)
    result = measure(target, drafters, prompts, list(DEPTHS), args.max_new_tokens, progress)
    print(json.dumps(result) if args.json else _table(result, args.profile))
    return 0 if all(run["identical"] for run in result["runs"]) else 1


def generate(args: argparse.Namespace) -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    from . import Eagle31DrafterModel, track_acceptance

    progress(f"loading {args.target} and {args.drafter}")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
    target = target.to(args.device).eval()
    drafter = Eagle31DrafterModel.from_pretrained(args.drafter, dtype=target.dtype).to(args.device).eval()
    if args.chat:
        messages = [{"role": "user", "content": args.prompt}]
        inputs: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(args.prompt, return_tensors="pt")
    options: dict[str, Any] = {"do_sample": args.temperature > 0} | ({"temperature": args.temperature} if args.temperature > 0 else {})
    if args.num_assistant_tokens is not None:
        options["num_assistant_tokens"] = args.num_assistant_tokens
    if args.seed is not None:
        torch.manual_seed(args.seed)
    streamer = None if args.json else TextStreamer(tokenizer, skip_prompt=True)
    with track_acceptance() as stats:
        sequence = target.generate(
            **inputs.to(args.device), assistant_model=drafter, max_new_tokens=args.max_new_tokens, streamer=streamer, **options
        )
    if args.json:
        text = tokenizer.decode(sequence[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(json.dumps({"text": text, **_counts(stats)}))
    else:
        print(stats.summary(), file=sys.stderr)
    return 0


def info(args: argparse.Namespace) -> int:
    from . import Eagle31DrafterModel

    drafter = Eagle31DrafterModel.from_pretrained(args.drafter)
    config = drafter.config
    kind = "EAGLE 3.1" if config.is_eagle31 else "EAGLE 3" if not (config.fc_norm or config.norm_output) else "between EAGLE 3 and 3.1"
    own, shared = ("its own", "the target's")
    rows = {
        "drafter": f"{args.drafter}: {kind}, {drafter.num_parameters():,} parameters",
        "target": config.target_model or "not named",
        "flags": ", ".join(
            f"{name}={getattr(config, name)}".lower() for name in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
        ),
        "layers": f"{config.num_hidden_layers}, width {config.hidden_size}, MLP {config.intermediate_size}, {config.num_attention_heads} "
        f"heads over {config.num_key_value_heads} key-value heads of {config.head_dim}{', q/k norm' if config.qk_norm else ''}",
        "reads": f"{config.num_aux_states} target states of width {config.target_hidden_size}, hidden_states indices "
        f"{config.aux_hidden_state_layer_ids or '[2, L // 2, L - 3]'}",
        "vocabulary": f"proposes {config.draft_vocab_size} of {config.vocab_size} ids; embedding: "
        f"{shared if config.share_target_embeddings else own}, head: {shared if config.share_target_head else own}",
        "rope": json.dumps(config.rope_parameters),
        "drafting": f"num_assistant_tokens={drafter.generation_config.num_assistant_tokens}",
    }
    if args.json:
        print(json.dumps({"kind": kind, "parameters": drafter.num_parameters(), "config": config.to_dict()}))
    else:
        print("\n".join(f"{name:<11} {text}" for name, text in rows.items()))
    return 0


def _show_completion(target, tokenizer, drafter, prompt, max_new_tokens: int) -> None:
    """Streams one completion by the target alone and one with the drafter, so that the difference can be seen."""
    import torch
    from transformers import TextStreamer

    print(f"--- the prompt, from a file neither model was trained on\n{tokenizer.decode(prompt[0], skip_special_tokens=True)}")
    for title, options in (("the target alone", {}), ("with the EAGLE 3.1 drafter", {"assistant_model": drafter})):
        print(f"\n--- {title}", flush=True)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        mask = torch.ones_like(prompt)
        target.generate(prompt, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer, **options)


def _table(result: dict[str, Any], with_profile: bool) -> str:
    env = result["environment"]
    lines = [
        "",
        f"target alone: {result['target']['tokens_per_second']:.1f} tokens/s "
        f"({env['prompts']} prompts x {env['max_new_tokens']} tokens, greedy, {env['dtype']}, {env['device']}, {env['threads']} threads)",
        "drafter  depth  tokens/s  speedup  accepted length  accepted by position (share of drafted)     overhead  same text",
    ]
    for run in result["runs"]:
        pairs = zip(run["accepted_per_position"], run["drafted_per_position"], strict=True)
        rates = " ".join(f"{accepted / drafted:.2f}" for accepted, drafted in pairs)
        lines.append(
            f"{run['drafter']:<8} {run['depth']:>5}  {run['tokens_per_second']:>8.1f}  {run['speedup']:>6.2f}x  "
            f"{run['mean_accepted_length']:>15.2f}  {rates:<42} {run['overhead']:>7.1%}  {'yes' if run['identical'] else 'NO'}"
        )
    if with_profile:
        lines += ["", "milliseconds of one generate() call"]
        parts = list(result["runs"][0]["profile"])
        lines += [f"{'':<28}" + "".join(f"{run['drafter']:>9}/{run['depth']}" for run in result["runs"])]
        lines += [f"{part:<28}" + "".join(f"{1000 * run['profile'][part]:>11.1f}" for run in result["runs"]) for part in parts]
    return "\n".join(lines)


def _counts(stats) -> dict[str, Any]:
    names = ("generated_tokens", "target_forwards", "mean_accepted_length", "accepted_per_position", "drafted_per_position")
    return {name: getattr(stats, name) for name in names}


class Parser(argparse.ArgumentParser):
    """Reports bad arguments the way all other input errors are reported."""

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def _device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _device(parser)
    parser.add_argument("--profile", action="store_true", help="also show where each millisecond goes")
    parser.add_argument("--prompts", type=positive, default=4, help="prompts to decode (default: 4)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="tokens per prompt (default: 64)")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _device(parser)
    parser.add_argument("--target", required=True, help="folder or Hub repository of the model to speed up")
    parser.add_argument("--drafter", required=True, help="folder or Hub repository of an EAGLE 3 or 3.1 drafter for it")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=positive, default=256)
    parser.add_argument("--num-assistant-tokens", type=int, help="tokens drafted a round (default: the drafter's own)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the target's chat template")


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", help="folder or Hub repository")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


# name: (function, what adds its arguments, one line, example)
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None], str, str]] = {
    "demo": (demo, _add_demo, "watch a trained pair decode the same text faster; offline", "eagle31 demo --profile"),
    "generate": (
        generate,
        _add_generate,
        "stream a completion with any target and drafter",
        'eagle31 generate --target Qwen/Qwen3-8B --drafter ./my-drafter --chat "Why is the sky blue?"',
    ),
    "info": (info, _add_info, "say what a drafter is", "eagle31 info ./my-drafter"),
}


def parser() -> argparse.ArgumentParser:
    main_parser = Parser(prog="eagle31", description="EAGLE 3.1 speculative decoding for transformers.")
    commands = main_parser.add_subparsers(required=True, metavar="command")
    for name, (function, add_arguments, line, example) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line, epilog=f"example: {example}")
        add_arguments(command)
        command.set_defaults(function=function)
    return main_parser


def main(arguments: list[str] | None = None) -> int:
    """Parses and runs; input errors are one line on stderr and status 2, other failures status 1."""
    try:
        args = parser().parse_args(arguments)
        return args.function(args)
    except (ValueError, OSError) as error:
        print("eagle31: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except (RuntimeError, ImportError) as error:
        print("eagle31: failed: " + " ".join(str(error).split()), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
