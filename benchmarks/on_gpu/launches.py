"""Counts, for a round on a GPU, of the times the host waits for the device and of the operations it launches."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .run import Row, Run

SHORT, LONG = 12, 36  # new tokens of two calls, whose difference leaves out what is done once a call
MOST_KERNELS = 60  # of those that are told one by one
LAUNCHING = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
NO_GPU = {"left_out": "no GPU"}
Call = Callable[[int], int]  # decodes so many new tokens; returns the rounds it took


def host_waits(run: Run, call: Call) -> Row:
    """Counts the times a round makes the host wait for the device, in all and by line of code. Waits for an event
    are not seen."""
    if not run.is_gpu:
        return NO_GPU
    call(SHORT)  # first uses of kernels
    found = torch.cuda.get_sync_debug_mode()
    counts = []
    try:
        torch.cuda.set_sync_debug_mode("warn")
        for new_tokens in (SHORT, LONG):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                rounds = call(new_tokens)
            places = (f"{each.filename.split('/eagle31_hf/')[-1]}:{each.lineno}" for each in warned if _is_wait(each))
            counts.append((rounds, Counter(places)))
    finally:
        torch.cuda.set_sync_debug_mode(found)
    (few, short), (many, long) = counts
    rounds = max(1, many - few)
    lines = {place: (count - short[place]) / rounds for place, count in long.most_common()}
    return {"waits": sum(lines.values()), "lines": {place: count for place, count in lines.items() if count}}


def _is_wait(warned: Any) -> bool:
    return "called a synchronizing" in str(warned.message)


def launches_of_round(run: Run, call: Call) -> Row:
    """Kernels and copies that the device runs in a round, with the microseconds they take there, and calls of the
    driver by which the host launches them and waits for them."""
    if not run.is_gpu:
        return NO_GPU
    call(SHORT)
    (few, short), (many, long) = (_profiled(call, new_tokens) for new_tokens in (SHORT, LONG))
    rounds = max(1, many - few)
    counts = {name: (count - short[name]) / rounds for name, count in long.most_common()}
    by_kind: dict[str, dict[str, float]] = {"kernel": {}, "microseconds": {}, "launch": {}, "wait": {}}
    for (kind, name), value in counts.items():
        by_kind[kind][name[:100]] = round(by_kind[kind].get(name[:100], 0.0) + value, 2)
    return {
        "kernels": sum(by_kind["kernel"].values()),
        "launches": sum(by_kind["launch"].values()),
        "by_launch": by_kind["launch"],
        "by_wait": by_kind["wait"],
        "by_kernel": dict(list(by_kind["kernel"].items())[:MOST_KERNELS]),
        "microseconds": sum(by_kind["microseconds"].values()),
        "by_microseconds": dict(list(by_kind["microseconds"].items())[:MOST_KERNELS]),
    }


def _profiled(call: Call, new_tokens: int) -> tuple[int, Counter]:
    """The rounds of a call, and its events by (kind, name), kinds those of `launches_of_round`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        rounds = call(new_tokens)
        torch.cuda.synchronize()
    counts: Counter = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counts["kernel", event.name] += 1
            counts["microseconds", event.name] += event.time_range.elapsed_us()
        elif event.name.startswith(LAUNCHING):
            counts["launch", event.name] += 1
        elif "Synchronize" in event.name:
            counts["wait", event.name] += 1
    return rounds, counts
