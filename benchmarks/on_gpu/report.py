"""The results of `benchmarks/gpu.py` as a text for people."""

from collections.abc import Iterator
from typing import Any

# What is shown of a row, where it has it: key -> the column's head, and how its value is written.
COLUMNS: dict[str, tuple[str, str]] = {
    "tokens_per_second": ("tokens/s", ".1f"),
    "mean_accepted_length": ("tokens/round", ".2f"),
    "round_ms": ("round ms", ".3f"),
    "draft_ms": ("draft ms", ".3f"),
    "verify_ms": ("verify ms", ".3f"),
    "gap_ms": ("gap ms", ".3f"),
    "step_ms": ("step ms", ".4f"),
    "round_over_floor": ("round/floor", ".2f"),
    "verify_over_floor": ("verify/floor", ".2f"),
    "draft_over_floor": ("draft/floor", ".2f"),
    "ms": ("ms", ".4f"),
    "ms_of_reference": ("reference ms", ".4f"),
    "ms_of_linear": ("linear ms", ".4f"),
    "ms_of_dequantized": ("dequantized ms", ".4f"),
    "ms_a_token": ("ms/token", ".3f"),
    "ms_a_forward": ("ms/forward", ".3f"),
    "ms_of_forward": ("forward ms", ".3f"),
    "over_floor": ("/floor", ".2f"),
    "gb_per_second": ("GB/s", ".1f"),
    "share_of_copy": ("of copy", ".0%"),
    "tflops": ("TFLOP/s", ".1f"),
    "error_of_scale": ("of scale", ".1e"),
    "ran": ("ran", ""),
    "equal": ("same text", ""),
    "fused": ("fused", ""),
    "waits": ("waits", ".2f"),
    "kernels": ("kernels", ".1f"),
    "launches": ("launches", ".1f"),
    "seconds_to_capture": ("s to capture", ".2f"),
    "seconds_to_compile": ("s to compile", ".1f"),
}
LONGEST = 40  # characters of a word in a cell


def table(results: dict[str, Any]) -> str:
    """A table for each section, and what was left out or went wrong."""
    lines = []
    for name, section in results["sections"].items():
        lines += ["", f"{section.get('title', name)} ({name}, {section.get('seconds', 0):.0f} s)"]
        lines += _rows(section["rows"])
        lines += [f"  {key}: {_last_line(section[key])}" for key in ("left_out", "error") if key in section]
    return "\n".join(lines[1:])


def _rows(rows: list[dict[str, Any]]) -> Iterator[str]:
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    cells = [["", *(COLUMNS[key][0] for key in keys)]]
    cells += [[row["name"], *(_written(key, row.get(key)) for key in keys), _instead(row)] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys) + 1)]
    for line in cells if keys else cells[1:]:
        first = line[0].ljust(widths[0])
        others = "  ".join(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=False))
        yield f"  {first}  {others}  {''.join(line[len(widths) :])}".rstrip()


def _written(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:{COLUMNS[key][1]}}"[:LONGEST]


def _instead(row: dict[str, Any]) -> str:
    """Returns the words printed for a row without figures: the error it ended in, why it was left out, or why its
    rounds ran eagerly."""
    if "error" in row:
        return f"failed: {_last_line(row['error'])}"
    if "left_out" in row:
        return f"left out: {row['left_out']}"
    how = row.get("executions", {})
    return "; ".join(each for each in how if each.startswith("eagerly"))[:120]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:160] if lines else ""
