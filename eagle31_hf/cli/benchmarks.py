"""`eagle31 bench`: measurements that are reported as ratios within one run."""

import argparse
import json

from .parsing import positive, progress


def bench(args: argparse.Namespace) -> int:
    from ..bench.conversion import measure_conversion

    progress(f"converting {args.megabytes} MB of random weights, {args.rounds} rounds beside a plain copy")
    result = measure_conversion(args.megabytes, args.rounds, args.folder)
    if args.json:
        print(json.dumps(result))
    else:
        print("source       size     copy       convert    convert / copy speed")
        for row in result["conversion"]:
            print(
                f"{row['form']:<11}  {row['bytes'] / 1e6:>4.0f} MB  {row['copy_mb_per_second']:>5.0f} MB/s "
                f"{row['convert_mb_per_second']:>6.0f} MB/s {row['ratio']:>9.0%}"
            )
    return 0


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("convert",), help="convert: converting a checkpoint, beside copying it")
    parser.add_argument("--megabytes", type=positive, default=1000, help="size of the checkpoint (default: 1000)")
    parser.add_argument("--rounds", type=positive, default=3, help="the fastest counts (default: 3)")
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
