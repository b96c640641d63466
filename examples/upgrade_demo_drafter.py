"""The demo's EAGLE 3 drafter made an EAGLE 3.1 one by calibration alone, beside the drafter it was and the one trained
as EAGLE 3.1.

    python examples/upgrade_demo_drafter.py [--prompts 12] [--max-new-tokens 96] [--depth 7]

Calibrated on 4,096 tokens of the corpus the drafters were trained on; all acceptance is of held-out files.
"""

import argparse
from itertools import islice

from corpus import training_files

import eagle31_hf
from eagle31_hf import demo
from eagle31_hf.diagnostics.acceptance import measure_acceptance

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--prompts", type=int, default=12)
parser.add_argument("--max-new-tokens", type=int, default=96)
parser.add_argument("--depth", type=int, default=7)
args = parser.parse_args()

target, tokenizer = demo.load_target()
eagle3, eagle31 = (demo.load_drafter(name) for name in ("eagle3", "eagle31"))
texts = [tokenizer(text, return_tensors="pt")["input_ids"][:, 300:428] for text in islice(training_files(), 0, 480, 12)]
upgraded = eagle31_hf.upgrade_to_eagle31(
    eagle3, target, [t for t in texts if t.shape[1] == 128], num_prompts=1, max_new_tokens=8
)
report = upgraded.upgrade_report
print(
    f"fused state moved by {report.fused_movement:.1%} (one scale a state: {report.fused_movement_scalar:.1%}), "
    f"fed-back state by {report.feedback_movement:.1%}"
)
for name, drafter in {"EAGLE 3": eagle3, "upgraded": upgraded, "EAGLE 3.1, trained": eagle31}.items():
    prompts = demo.prompts(tokenizer, args.prompts)
    stats = measure_acceptance(target, drafter, prompts, args.depth, args.max_new_tokens)
    rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rates)
    print(f"{name:<20} accepted length {stats.mean_accepted_length:.2f}   by position {rates}", flush=True)
