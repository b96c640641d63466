"""Counts of a server, beside the statistics of the same calls."""

import threading

import pytest
import torch

from eagle31_hf import demo, track_acceptance
from eagle31_hf.serving.metrics import Metrics


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = demo.load_target()
    return target, demo.load_drafter("eagle31"), demo.prompts(tokenizer, 3, 24)


def counts_of(metrics):
    """The counters by name, those of a position as name{position}."""
    lines = [line for line in metrics.as_text().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def generate(pair, number, **options):
    target, drafter, prompts = pair
    ids = prompts[number]
    options = {"max_new_tokens": 12, "do_sample": False, "num_assistant_tokens": 3} | options
    return target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **options)


def test_counts_are_those_of_the_statistics(pair):
    metrics = Metrics()
    with track_acceptance() as stats:
        for number in range(3):
            with metrics.request():
                generate(pair, number, num_assistant_tokens=2 + number)
    found = counts_of(metrics)
    assert found["eagle31:requests_total"] == 3
    assert found["eagle31:requests_stopped_total"] == 0
    assert found["eagle31:generation_tokens_total"] == stats.generated_tokens
    assert found["eagle31:spec_decode_num_drafts_total"] == stats.target_forwards
    assert found["eagle31:spec_decode_num_draft_tokens_total"] == sum(stats.drafted_per_position)
    assert found["eagle31:spec_decode_num_accepted_tokens_total"] == sum(stats.accepted_per_position)
    by_position = [found[f'eagle31:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(4)]
    assert by_position == stats.accepted_per_position


def test_a_request_that_ends_early_counts_with_what_it_had(pair):
    class Gone:
        def put(self, value):
            if value.ndim == 1 and value.numel() > 0 and not hasattr(self, "first"):
                self.first = True
            elif hasattr(self, "first"):
                raise ConnectionError

        def end(self):
            """Not reached."""

    metrics = Metrics()
    with pytest.raises(ConnectionError), metrics.request():
        generate(pair, 0, streamer=Gone())
    found = counts_of(metrics)
    assert (found["eagle31:requests_total"], found["eagle31:requests_stopped_total"]) == (0, 1)
    assert found["eagle31:generation_tokens_total"] > 0


def test_its_text_is_what_prometheus_reads(pair):
    metrics = Metrics()
    with metrics.request():
        generate(pair, 0)
    metrics.count("requests_not_drafted")
    lines = metrics.as_text().splitlines()
    described = {line.split()[2] for line in lines if line.startswith("# HELP ")}
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE ") and line.endswith(" counter")}
    counted = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
    assert described == typed == counted
    assert "eagle31:requests_not_drafted_total 1" in lines


def test_threads_share_them():
    metrics = Metrics()

    def many():
        for _ in range(200):
            with metrics.request():
                metrics.count("requests_not_drafted")

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = counts_of(metrics)
    assert found["eagle31:requests_total"] == found["eagle31:requests_not_drafted_total"] == 1600
