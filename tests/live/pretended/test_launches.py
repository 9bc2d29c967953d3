"""How many launches a decode step takes beyond the model's own, by policy and format."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from arborsim_torch import decoder
from arborsim_torch.decoder import Pass

from .arming import pretend
from .test_policies import run

KERNELS = importlib.util.find_spec("triton") and importlib.util.find_spec(
    "arborsim_torch.kernels.pieces_triton"
)
LAYERS = 6
MOST_PER_LAYER = 12
MOST_PER_STEP = 12  #: for tables and what is collected, whatever the number of layers
NO_LAUNCH = ("empty", "new_empty")  #: memory that no kernel fills
#: With which tokens reach DDR within so short a search
SETTINGS = {
    name: {"pin_prompt": "false", "interval": "8", "recent": "8"}
    for name in ("hierarchy", "redundancy", "attn-val-redundancy")
}
#: What full retention adds to the model: keys and values are stored, attention is computed, and its
#: output is read in another layout.
OF_THE_CACHE = ("copy_", "efficient attention", "reshape")


def launches(name: str, budget: int, recall: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of every decode step of a short search; its last steps read what a policy has moved."""
    found, compute = [], decoder._computed

    with pretend() as gpu:

        def watched(passes: Sequence[Pass]) -> Any:
            before = gpu.launches.copy()
            result = compute(passes)
            step = gpu.launches - before
            if passes[0].ids.shape[1] == 1:
                found.append(Counter({n: k for n, k in step.items() if n not in NO_LAUNCH}))
            return result

        monkeypatch.setattr(decoder, "_computed", watched)
        monkeypatch.setattr(decoder, "refusal", lambda _: "a replay has no launches")
        run([name], "cuda", budget, recall=recall, most=20, settings=SETTINGS.get(name))
    monkeypatch.undo()
    return found


@pytest.fixture(scope="module")
def own() -> Counter[str]:
    """Launches of the model in one step."""
    with pytest.MonkeyPatch.context() as patch:
        step = launches("full", 1000, "stage", patch)[-1]
    return Counter({name: count for name, count in step.items() if name not in OF_THE_CACHE})


@pytest.mark.skipif(not KERNELS, reason="needs Triton kernels")
@pytest.mark.parametrize(
    ("name", "recall"),
    [
        ("full", "stage"), ("streaming-llm", "stage"), ("epikv", "stage"), ("quest", "stage"),
        ("h2o", "stage"),  # mean rows
        ("pyramidkv", "stage"),  # rows and plans of layers
        ("adakv", "stage"), ("duoattention", "stage"),  # plans of heads
        ("arkv", "stage"), ("arkv-quant", "stage"),  # spread over heads; FP8
        ("kivi", "stage"),  # packed
        ("thinkv-paper", "stage"),  # large entries of single heads, counted
        ("hierarchy", "stage"), ("staircase", "stage"),  # staged, two formats
        ("staircase", "stream"), ("freekv", "stream"), ("hierarchy", "stream"),
        ("staircase", "near"), ("freekv", "near"), ("hierarchy", "near"),
        ("staircase", "ondemand"), ("freekv", "ondemand"), ("hierarchy", "ondemand"),
        ("redundancy", "ondemand"), ("attn-val-redundancy", "ondemand"),
    ],
)  # fmt: skip
def test_a_layer_takes_few_launches(
    name: str, recall: str, own: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = launches(name, 40, recall, monkeypatch)
    most = max((step - own).total() for step in steps)
    assert most <= LAYERS * MOST_PER_LAYER + MOST_PER_STEP, steps[-1] - own
