"""The static decode step: the same as the eager one, traceable, and on tensors that stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from arborsim.core.tiers import Tier
from arborsim.policies.registry import build
from arborsim.searches import make_search
from arborsim_torch import static as static_steps
from arborsim_torch.batches import run_batched
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.static import StaticStep, refusal, rounded
from arborsim_torch.tiers.codec import Fp8
from arborsim_torch.tiers.link import HostLink
from tests.live.pretended.test_policies import BUDGET, NAMES, WHOLE_THOUGHTS, compare, run
from tests.live.tiny import FAMILIES, VOCAB, FakeSource, tiny_model, torch


def decoders(model: Any) -> tuple[TreeDecoder, TreeDecoder]:
    """One whose steps are static, eagerly, and one as always."""
    pair = TreeDecoder(model), TreeDecoder(model)
    pair[0].static = StaticStep(model, pair[0].cache, graphs=False)
    return pair


def on_a_tree(decoder: TreeDecoder, steps: int = 6) -> list[Any]:
    rng = np.random.default_rng(5)
    found = [decoder.prefill(rng.integers(0, VOCAB, 40).tolist())]
    for node in (1, 2, 3, 4):
        decoder.open(node, 0)
    for leaves in ([1], [1, 2, 3, 4], [2, 4], [1, 3]):
        decoder.activate(leaves)
        found += [decoder.step(rng.integers(0, VOCAB, len(leaves)).tolist()) for _ in range(steps)]
    return found


@pytest.mark.parametrize("family", [f for f in FAMILIES if not refusal(tiny_model(f))])
def test_static_steps_are_the_eager_ones(family: str) -> None:
    found, wanted = map(on_a_tree, decoders(tiny_model(family)))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def with_and_without_padding(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[Any]:
    found = [run()]
    monkeypatch.setattr(static_steps, "padded", lambda seqs: seqs)
    return [*found, run()]


@pytest.mark.parametrize(
    ("family", "grouping"), [("llama", "shared"), ("gemma3", "layer"), ("qwen2", "head")]
)
def test_padded_sequences_change_nothing(
    family: str, grouping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64: matrix products may round otherwise with more rows, by 1e-16 of their size."""
    model, rows = tiny_model(family).double(), []

    def noted(step: StaticStep, states: list[Any], hidden: list[Any]) -> Any:
        rows.append(len(step._input[0]))
        return compute(step, states, hidden)

    def run() -> list[Any]:
        cache = TieredCache(Layout.of(model, grouping), page_tokens=4)
        decoder = TreeDecoder(model, cache=cache)
        decoder.static = StaticStep(model, cache, graphs=False)
        rng = np.random.default_rng(5)
        found = [decoder.prefill(rng.integers(0, VOCAB, 40).tolist())]
        for node in range(1, 6):
            decoder.open(node, 0)
        for leaves in ([2], [1, 2, 3], [1, 2, 3, 4, 5], [5, 2, 4]):
            decoder.activate(leaves)
            for _ in range(3):
                found.append(decoder.step(rng.integers(0, VOCAB, len(leaves)).tolist()))
                assert len(found[-1]) == len(leaves)
        return found

    monkeypatch.setattr(StaticStep, "compute", noted)
    found, wanted = with_and_without_padding(monkeypatch, run)
    assert rows == [1] * 3 + [4] * 3 + [8] * 3 + [4] * 3 + [1] * 3 + [3] * 3 + [5] * 3 + [3] * 3
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "budget"), [("h2o", 50), ("arkv", 50), ("epikv", 50)])
def test_padded_sequences_leave_no_signal(
    name: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and hidden states of policies that evict, so that what is padded takes freed slots."""
    widths = []

    def noted(step: StaticStep, states: list[Any], hidden: list[Any]) -> Any:
        widths.extend((own.metadata.num_seqs, len(own.metadata.first)) for own in states)
        return compute(step, states, hidden)

    def run() -> Any:
        return search(name, {"recent": "8"} if name == "epikv" else {}, "best-of-n", monkeypatch,
                      noted, n=3, budget=budget, model=tiny_model().double())  # fmt: skip

    found, wanted = with_and_without_padding(monkeypatch, run)
    assert {(4, 3), (3, 3)} <= set(widths)
    assert found["token"].tolist() == wanted["token"].tolist()
    # Stored in float32, of numbers that rounding moves by 1e-15.
    np.testing.assert_allclose(found["logprob"], wanted["logprob"], rtol=2e-7)


@pytest.mark.parametrize("family", ["phi3-longrope", "mixtral", "qwen3_moe"])
def test_what_cannot_be_captured_is_said(family: str) -> None:
    assert refusal(tiny_model(family))


def test_buckets_waste_an_eighth_at_most() -> None:
    sizes = np.arange(1, 40000)
    rooms = np.array([rounded(int(n)) for n in sizes])
    assert (rooms >= sizes).all()
    assert (rooms[64:] <= sizes[64:] * 1.125).all()
    assert (np.diff(rooms) >= 0).all()
    assert len(np.unique(rooms)) < 90
    assert (rooms % 8 == 0).all()


#: Policies, of searches that run together, their settings, and searches.
SEARCHES = [
    ("full", {}, "linear"),
    ("streaming-llm", {}, "linear"),
    ("h2o", {"per": "shared"}, "linear"),
    ("epikv", {"recent": "8"}, "linear"),
    ("arkv", {}, "linear"),
    ("full", {}, "best-of-n"),
    ("h2o,streaming-llm", {}, "linear"),
    ("hierarchy", {"pin_prompt": "false", "recent": "8", "interval": "8"}, "linear"),
]  # fmt: skip
Steps = Callable[[StaticStep, list[Any], list[Any]], Any]


def search(
    name: str, settings: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch, steps: Steps,
    n: int = 4, budget: int = 50, model: Any = None, recall: str = "stage",
) -> dict[str, Any]:  # fmt: skip
    """Columns of the first search on static steps, which `steps` computes; no step is another."""
    attach = LiveExecutor.attach

    def attached(executor: LiveExecutor, decoder: TreeDecoder) -> None:
        decoder.static = StaticStep(decoder.model, decoder.cache, graphs=False)
        attach(executor, decoder)

    monkeypatch.setattr(LiveExecutor, "attach", attached)
    monkeypatch.setattr(StaticStep, "compute", steps)
    options = {"n": str(n)} if kind == "best-of-n" else {}
    source = FakeSource(thoughts=6)
    model = tiny_model() if model is None else model
    setup = SearchSetup(model, source, lambda: make_search(kind, **options), 0.0, 0, 40)
    searches = [
        PolicySearch(
            setup, source.problem(0), build(each, settings), budget, CacheOptions(recall=recall)
        )
        for each in name.split(",")
    ]
    ended: dict[int, Any] = {}
    run_batched(searches, len(searches), lambda one, result: ended.update({id(one): result}))
    return ended[id(searches[0])].columns  # type: ignore[no-any-return]


compute = StaticStep.compute


@pytest.mark.parametrize("name", NAMES)
def test_policies_decide_the_same_on_static_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = name in WHOLE_THOUGHTS
    budget, most = (BUDGET, 130) if whole else (40, 20)
    wanted = run([name], "cpu", budget, most=most)
    attach, steps = LiveExecutor.attach, []

    def attached(executor: LiveExecutor, decoder: TreeDecoder) -> None:
        decoder.static = StaticStep(decoder.model, decoder.cache, graphs=False)
        attach(executor, decoder)

    def counted(step: StaticStep, states: list[Any], hidden: list[Any]) -> Any:
        steps.append(step.bucket)
        return compute(step, states, hidden)

    monkeypatch.setattr(LiveExecutor, "attach", attached)
    monkeypatch.setattr(StaticStep, "compute", counted)
    compare(run([name], "cpu", budget, most=most), wanted)
    assert len(steps) >= 10


def test_searches_together_decide_the_same_on_static_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end at different times, read attention and hidden states or neither, per head or not."""
    names = ["full", "h2o", "epikv", "arkv", "hierarchy"]
    wanted = run(names, "cpu", 40, most=20)
    attach, together = LiveExecutor.attach, []

    def attached(executor: LiveExecutor, decoder: TreeDecoder) -> None:
        decoder.static = StaticStep(decoder.model, decoder.cache, graphs=False)
        attach(executor, decoder)

    def counted(step: StaticStep, states: list[Any], hidden: list[Any]) -> Any:
        together.append(len(states))
        return compute(step, states, hidden)

    monkeypatch.setattr(LiveExecutor, "attach", attached)
    monkeypatch.setattr(StaticStep, "compute", counted)
    compare(run(names, "cpu", 40, most=20), wanted)
    assert together.count(len(names)) >= 10


@pytest.mark.parametrize(("name", "settings", "kind"), SEARCHES)
def test_a_step_is_one_graph_to_the_compiler(
    name: str, settings: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Dynamo traces in one piece looks at no number on the host and has static shapes."""
    torch._dynamo.reset()
    traced = []

    def compiled(step: StaticStep, states: list[Any], hidden: list[Any]) -> Any:
        if len(traced) >= 2:
            return compute(step, states, hidden)
        twins = [state.again(state.metadata) for state in states]
        wanted = compute(step, twins, hidden)
        hidden.clear()
        once = torch.compile(compute, fullgraph=True, backend="eager", dynamic=False)
        found = once(step, states, hidden)
        for one, other in zip(found.tensors(), wanted.tensors(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        traced.append(len(found.tensors()))
        return wanted

    search(name, settings, kind, monkeypatch, compiled)
    assert len(traced) == 2
    assert traced[0] >= {"epikv": 6, "h2o": 4, "arkv": 3}.get(name, 2)


def test_formats_are_pieces_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    found, read = [], []

    def compiled(step: StaticStep, states: list[Any], hidden: list[Any]) -> Any:
        read.append(len(states[0].metadata.pieces(0)))
        return torch.compile(compute, fullgraph=True, backend="eager", dynamic=False)(
            step, states, hidden
        )

    model = tiny_model()
    monkeypatch.setattr(StaticStep, "compute", compiled)
    for static in (True, False):
        cache = TieredCache(Layout.of(model), quantised=(Fp8(),))
        decoder = TreeDecoder(model, cache=cache)
        decoder.prefill(list(range(40)))
        decoder.open(1, 0)
        decoder.activate([1])
        with HostLink(model.device) as link:
            pairs = GroupTokenPairs(np.zeros(12, dtype=np.int64), np.arange(4, 16))
            Mover(cache, link).move(pairs, np.full(12, Tier.HBM_QUANTISED, dtype=np.int8))
            if static:
                decoder.static = StaticStep(model, cache, graphs=False)
            found.append(torch.cat([decoder.step([token]) for token in (3, 5)]))
    assert read == [2, 2]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class Addresses(TorchDispatchMode):
    """Notes every operation with the addresses of what was there before it all began."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.alive: list[Any] = []
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs or {}))
        given = [x for x in flat if isinstance(x, torch.Tensor)]
        before = [
            (x.data_ptr(), tuple(x.shape), x.stride())
            for x in given
            if x.untyped_storage()._cdata not in self.made
        ]
        if not function.is_view:  # a view that is known need not be made again
            self.seen.append((str(function), tuple(before)))
        result = function(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in given}
        for x in torch.utils._pytree.tree_flatten(result)[0]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                self.made.add(x.untyped_storage()._cdata)
                self.alive.append(x)
        return result


@pytest.mark.parametrize(
    ("name", "settings", "kind", "recall"),
    [*((*each, "stage") for each in SEARCHES), (*SEARCHES[-1], "stream")],
)
def test_a_step_reads_and_writes_where_the_last_one_did(
    name: str, settings: dict[str, str], kind: str, recall: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[Any, list[Any]] = defaultdict(list)

    def noted(step: StaticStep, states: list[Any], hidden: list[Any]) -> Any:
        with Addresses() as addresses:
            found = compute(step, states, hidden)
        seen[tuple(each.bucket for each in step._together)].append(addresses.seen)
        return found

    search(name, settings, kind, monkeypatch, noted, recall=recall)
    steps = [len(own) for own in seen.values()]
    assert sum(steps) >= 20
    assert max(steps) >= (8 if kind == "linear" else 4)
    for own in seen.values():
        assert len(own[0]) > 20
        assert all(each == own[0] for each in own)
