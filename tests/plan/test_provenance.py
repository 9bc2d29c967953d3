"""The appendix of a plan: values as people write them, none of Python's."""

from __future__ import annotations

import re
from pathlib import Path

from arborsim.plan.provenance import assumed_numbers, settings_of
from arborsim.plan.workload_file import example_workload, parse_workload
from tests.plan.make import small_workload

_REPR = re.compile(r"\w+\(\w+=|\bTrue\b|\bFalse\b|\bNone\b|\d{9,}|\de[-+]\d|\d\.0\b")


def test_no_value_is_a_repr_of_python() -> None:
    workload = parse_workload(example_workload(), Path())
    settings = settings_of(workload)
    del settings["versions"]
    texts = [text.replace("10.0 µs", "10 µs") for text in settings.values()]
    assert [text for text in (*texts, *assumed_numbers(workload)) if _REPR.search(text)] == []


def test_serving_options_have_units() -> None:
    text = settings_of(small_workload())["serving"]
    for words in ("max_searches as many as fit", "prefix_sharing on", "watermark 0.01",
                  "all_reduce_bytes_per_s 450 GB/s", "all_reduce_latency_s 10.0 µs",
                  "nvme_bytes_per_s 6.00 GB/s"):  # fmt: skip
        assert words in text


def test_distributions_are_written_as_the_workload_states_them() -> None:
    text = settings_of(small_workload())["mix: trees"]
    assert "4 searches generated from seed 0: prompt_tokens uniform:low=100,high=900" in text
    assert "branching 2, first 4, pruned [0.5], solved 0.5; 50 prompt tokens in common" in text


def test_every_assumed_number_has_its_unit() -> None:
    workload = small_workload()
    found = assumed_numbers(workload)
    profiles = {each.profile.name: each.profile for each in workload.hardware}
    assert len(found) == sum(len(profile.assumed()) for profile in profiles.values())
    assert "rtx4090: h2d_bytes_per_s 25 GB/s" in found
    assert "rtx4090: pcie_latency_s 10 µs" in found
