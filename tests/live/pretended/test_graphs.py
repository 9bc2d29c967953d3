"""Decode steps as graphs on the pretended device: captured once per bucket, then replayed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arborsim.policies.registry import build
from arborsim.searches import make_search
from arborsim_torch.cache.layout import Place
from arborsim_torch.context import PassContext
from arborsim_torch.decoder import TreeDecoder, run_together
from arborsim_torch.graphs import Graphs, StepOutputs, refused
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.sources import RandomSource
from arborsim_torch.static import kind_of_steps
from tests.live.test_static import on_a_tree
from tests.live.tiny import VOCAB, tiny_model, torch

from .arming import pretend
from .clocks import Race
from .launches import Launcher
from .test_policies import compare, run

GOES_ON = pytest.mark.filterwarnings("ignore:a CUDA graph could not be captured")


def outputs(x: Any) -> StepOutputs:
    return StepOutputs(x, x, [], [PassContext(METADATA)])


METADATA: Any = None


class Model:
    """All that graphs need to know of one."""

    def __init__(self) -> None:
        self.device, self.config = torch.device("cuda"), SimpleNamespace()
        self.dtype, self.model = torch.float32, SimpleNamespace()


def graphs() -> Graphs:
    return Graphs(Model())


def test_a_capture_has_no_effect_and_a_replay_has_it_again() -> None:
    with pretend() as gpu, torch.inference_mode():
        total = torch.zeros(3, device="cuda")
        run = graphs()

        def compute() -> StepOutputs:
            total.add_(1)
            total[1:2] = total[:1] * 10
            return outputs(torch.nn.functional.pad(total, (0, 1), value=7.0) + 1)

        for count in range(1, 6):
            found = run.run("bucket", compute).logits.cpu().numpy()
            np.testing.assert_array_equal(found, [count + 1, 10 * count + 1, count + 1, 8])
        assert gpu.launches["graph replay"] == 4


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda x: x.sum().item(), "waits inside of a capture"),
        (lambda x: x.cpu(), "inside of a capture"),
        (lambda x: torch.tensor([1.0]).to("cuda"), "inside of a capture"),
        (lambda x: torch.empty(3, pin_memory=True), "page-locked memory"),
        (lambda x: torch.cuda.synchronize(), "waits inside of a capture"),
        (lambda x: x[x > 0], "waits inside of a capture"),
    ],
)
@GOES_ON
def test_what_no_graph_can_hold_is_found(fault: Any, why: str) -> None:
    def compute() -> StepOutputs:
        x = torch.ones(4, device="cuda")
        fault(x)
        return outputs(x)

    def captured() -> None:
        with pretend(), torch.inference_mode():
            run = graphs()
            run.run(0, compute)
            run.run(0, compute)

    with pytest.raises(AssertionError, match=why):
        captured()


@pytest.mark.parametrize("number", [7, 8, 16])
def test_a_kernel_is_compiled_before_it_is_captured(number: int) -> None:
    """Triton compiles anew for numbers that divide by 16, or are 1."""

    def captured() -> None:
        with pretend() as gpu, torch.inference_mode():
            x, kernel = torch.zeros(4, device="cuda"), Launcher("add", _added, (0,))
            kernel[(1,)](x, 3)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                kernel[(1,)](x, number)
            assert gpu.launches["add"] == 1

    if number % 16:
        captured()
    else:
        with pytest.raises(RuntimeError, match="previous error"):
            captured()


def _added(grid: tuple[int, ...], x: Any, number: int) -> None:
    x.add_(number)


def branched(fault: str = "") -> tuple[list[Any], int]:
    """What replays of a graph with a branch found: page-locked memory that is copied up."""
    with pretend() as gpu, torch.inference_mode():
        run, side, seen = graphs(), torch.cuda.Stream(), []
        host, there = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
        outside = torch.cuda.Event()
        outside.record(torch.cuda.current_stream())

        def compute() -> StepOutputs:
            here, captures = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
            before = there * 1  # reads what the branch will write
            if fault != "not forked" or not captures:
                side.wait_stream(here)
            with torch.cuda.stream(side):
                there.copy_(host, non_blocking=fault != "at once")
                event = side.record_event()
            if captures and fault == "asked":
                event.query()
            if captures and fault == "waits for what is outside":
                here.wait_event(outside)
            if captures and fault == "not joined":
                return outputs(before)
            if captures and fault == "read early":
                before = before + there
            here.wait_event(event)
            return outputs(before + there)

        for value in (1.0, 2.0, 3.0):
            host.fill_(value)
            seen.append(run.run(0, compute).logits.cpu().tolist())
        return seen, gpu.launches["graph replay"]


def test_a_branch_of_a_capture_is_replayed() -> None:
    seen, replays = branched()
    assert seen == [[2.0] * 4, [3.0] * 4, [5.0] * 4]
    assert replays == 2


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("not forked", "inside of a capture on another stream"),
        ("read early", "nothing puts them in order"),
        ("not joined", "not joined when the capture ends"),
        ("at once", "not page-locked or at once"),
        ("asked", "an event is asked inside of a capture"),
        ("waits for what is outside", "for what is outside"),
    ],
)
@GOES_ON
def test_a_branch_out_of_order_is_found(fault: str, why: str) -> None:
    with pytest.raises((AssertionError, Race), match=why):
        branched(fault)


def test_a_pool_outlives_the_graphs_that_were_captured_into_it() -> None:
    """One output is held while all graphs are dropped: the allocator takes no other capture then,
    unless a graph of the pool is kept."""
    with pretend(), torch.inference_mode():
        model, x = Model(), torch.ones(4, device="cuda")
        first, second = Graphs(model), Graphs(model)
        held = [first.run(0, lambda: outputs(x + 1)).logits for _ in range(2)]
        first.forget()
        found = [second.run(0, lambda: outputs(x + 2)).logits for _ in range(3)]
        assert (second.captures, second.replays, second.refused) == (1, 2, [])
        assert held[1].tolist() == [2.0] * 4
        assert found[2].tolist() == [3.0] * 4


def test_the_allocator_refuses_a_pool_whose_graphs_are_gone() -> None:
    with pretend(), torch.inference_mode():
        pool, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

        def captured() -> Any:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=aside):
                return torch.ones(4, device="cuda")

        held = captured()
        with torch.cuda.stream(torch.cuda.current_stream()), pytest.raises(
            RuntimeError, match="use_count > 0"
        ):  # fmt: skip
            captured()
        del held
        captured()


@pytest.mark.parametrize("invalid", [False, True])
@GOES_ON
def test_a_step_that_cannot_be_captured_is_computed_eagerly(invalid: bool) -> None:
    """Whether PyTorch raises, or CUDA, which lets no capture end that it has refused a call in."""
    with pretend() as gpu, torch.inference_mode():
        model, x = Model(), torch.ones(4, device="cuda")
        run, here, again = Graphs(model), torch.cuda.current_stream(), []

        def compute() -> StepOutputs:
            x.add_(1)
            if torch.cuda.is_current_stream_capturing():
                if invalid:
                    x.cpu()
                raise NotImplementedError("no such kernel\nand more")
            return outputs(x * 1)

        def good() -> StepOutputs:
            return outputs(x * 2)

        found = [run.run(0, compute, lambda: again.append(0)).logits.tolist()[0] for _ in range(4)]
        assert found == [2.0, 3.0, 4.0, 5.0]
        assert (run.captures, run.replays, len(run.refused), len(again)) == (0, 0, 1, 1)
        assert ("inside of a capture" if invalid else "no such kernel") in run.refused[0]
        assert "\n" not in run.refused[0]
        assert torch.cuda.current_stream() is here
        for _ in range(3):  # others are captured still
            assert run.run("good", good).logits.tolist() == [10.0] * 4
        assert (run.captures, run.replays) == (1, 2)
        for bucket in range(1, 5):  # and after some more failures, none is
            for _ in range(2):
                run.run(bucket, compute)
        assert len(refused(model)) == 3
        said = f"CUDA graphs, 3 not captured: {run.refused[0]}, small operations apart: "
        assert kind_of_steps(model, True).startswith(said)
        other = Graphs(model)
        for _ in range(3):
            other.run("good", good)
        assert (other.captures, len(other.refused)) == (0, 3)
        gpu.faults.clear()  # those that were planted


def test_memory_that_a_graph_reads_must_stay() -> None:
    def moved() -> None:
        with pretend():
            run, held = graphs(), [torch.ones(4, device="cuda")]
            for _ in range(2):
                run.run(0, lambda: outputs(held[0] + 1))
            held[0] = torch.ones(4, device="cuda")
            run.run(0, lambda: outputs(held[0] + 1))

    with pytest.raises(AssertionError, match="memory that was freed"):
        moved()


def test_steps_of_a_tree_are_replayed() -> None:
    model = tiny_model("qwen2")
    wanted = on_a_tree(TreeDecoder(copy.deepcopy(model)))
    with pretend() as gpu:
        decoder = TreeDecoder(model.to("cuda"))
        found = [x.cpu() for x in on_a_tree(decoder)]
        assert gpu.launches["graph replay"] >= 12
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def test_a_replayed_step_launches_and_allocates_next_to_nothing() -> None:
    with pretend() as gpu:
        decoder = TreeDecoder(tiny_model().to("cuda"))
        decoder.prefill(list(range(40)))
        decoder.cache.pools[0].reserve(128)
        decoder.open(1, 0)
        decoder.activate([1])
        for token in range(20):
            if token == 4:
                before, allocated, waits = gpu.launches.copy(), gpu.allocated, gpu.waits.copy()
                gpu.peak = allocated
            decoder.step([token % VOCAB])
        launches = gpu.launches - before
        assert launches["graph replay"] == 16
        del launches["empty"]  # reserves memory: no kernel
        assert launches.total() <= 16 * 6, launches  # inputs, the mask's entry, logits
        assert gpu.waits == waits
        assert gpu.peak - allocated < 4096


def test_a_search_of_many_widths_is_a_graph_for_each_power_of_two() -> None:
    model = tiny_model()
    rng = np.random.default_rng(2)
    levels = [rng.permutation(np.arange(1, 9))[:width].tolist() for width in (3, 8, 2, 5, 1, 7, 6)]

    def search(decoder: TreeDecoder) -> list[Any]:
        rng = np.random.default_rng(3)
        # From here to 1152 tokens there is one bucket of entries.
        found = [decoder.prefill(rng.integers(0, VOCAB, 1030).tolist())]
        decoder.cache.pools[0].reserve(1152)
        for node in range(1, 9):
            decoder.open(node, 0)
        for leaves in levels * 2:
            decoder.activate(leaves)
            found += [decoder.step(rng.integers(0, VOCAB, len(leaves)).tolist())]
        return found

    wanted = search(TreeDecoder(copy.deepcopy(model)))
    with pretend() as gpu:
        decoder = TreeDecoder(model.to("cuda"))
        found = [x.cpu() for x in search(decoder)]
        assert decoder.static is not None
        assert decoder.static.graphs is not None
        assert decoder.static.graphs.captures == 4  # of 1, 2, 4 and 8 leaves
        assert gpu.launches["graph replay"] == 2 * len(levels) - 4
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Searched:
    """A search, the places on the device that it uses, and when it has used all of them.

    `by` is the step after the first cut, from which slots may be listed.
    """

    policy: str
    settings: dict[str, str]
    places: set[Place]
    by: int
    budget: int = 60
    prompt: int = 50


@pytest.mark.parametrize(
    "case",
    [
        Searched("h2o", {"per": "shared"}, {Place.HBM}, 3),
        Searched("arkv-quant", {"window": "8"}, {Place.HBM, Place.HBM_QUANTISED}, 15),
        Searched("arkv-quant", {"window": "8"}, {Place.HBM, Place.HBM_QUANTISED}, 15, prompt=80),
        Searched("kivi", {"residual": "32"}, {Place.HBM, Place.HBM_QUANTISED}, 3, prompt=80),
        Searched("hierarchy", {"pin_prompt": "false", "recent": "8", "interval": "8"},
                 {Place.HBM, Place.STAGING}, 24),
    ],
    ids=lambda case: f"{case.policy} {case.prompt}",
)  # fmt: skip
def test_nothing_is_allocated_after_the_first_steps(case: Searched) -> None:
    """Pools and their tables keep their memory: the first tokens of each reserve what it needs."""
    with pretend():
        source = RandomSource(VOCAB, case.prompt, 70, 70)
        setup = SearchSetup(
            tiny_model().to("cuda"), source, lambda: make_search("linear"), 0.0, 0, 70
        )
        policy = build(case.policy, case.settings)
        one = PolicySearch(setup, source.problem(0), policy, case.budget, CacheOptions())
        steps = one.steps()
        tokens, seen = next(steps), []
        for _ in range(68):
            logits = run_together([one.prepare(tokens)])
            pools = {
                place: pool.addresses for place, pool in one.cache.pools.items()
                if pool.allocations and not place.on_host
            }  # fmt: skip
            tables = {
                (table.place, *name): number
                for table in one.cache._pieces._tables.values()
                for name, (_, number) in table._tensors.items()
            }
            seen.append((pools, tables))
            tokens = steps.send(logits[0][:, 0])
        steps.close()
    assert set(seen[-1][0]) == case.places
    changed = [step for step, each in enumerate(seen) if each != seen[-1]]
    assert max(changed, default=-1) < case.by, changed


@pytest.mark.parametrize(
    ("names", "recall"),
    [
        *(([name], "stage") for name in ("full", "streaming-llm", "h2o", "epikv", "arkv", "adakv")),
        (["kivi"], "stage"),
        *((["hierarchy"], recall) for recall in ("stage", "stream")),
        *((["h2o", "full", "hierarchy"], recall) for recall in ("stage", "stream")),
    ],
)
def test_searches_are_the_same_with_graphs_and_without(names: list[str], recall: str) -> None:
    """Policies for all layers alike, per layer and per head; formats, rows and hidden states.

    Tokens in DDR are staged, or streamed; several searches run together.
    """
    wanted = run(names, "cpu", 40, recall=recall, most=20)
    with pretend() as gpu:
        found = run(names, "cuda", 40, recall=recall, most=20)
        assert gpu.launches["graph replay"] >= 4
    compare(found, wanted)


def test_steps_that_read_nothing_of_the_host_are_replayed() -> None:
    """Also where tokens are read on demand: DDR may hold those alone that were not chosen."""

    def search(device: str) -> tuple[list[torch.Tensor], int]:
        """Logits, and how many steps there were while DDR held tokens and a graph was replayed."""
        source = RandomSource(VOCAB, 50, 70, 70)
        model = tiny_model().to(device)
        setup = SearchSetup(model, source, lambda: make_search("linear"), 0.0, 0, 70)
        options = CacheOptions(recall="ondemand", overlap=False)
        one = PolicySearch(setup, source.problem(0), build("freekv"), 70, options)
        steps, found, count = one.steps(), [], 0
        tokens = next(steps)
        for _ in range(68):
            held, before = one.cache.pools[Place.DDR].slots.total, one.replayed_steps
            logits = run_together([one.prepare(tokens)])
            found.append(logits[0][:, 0].cpu())
            count += held > 0 and one.replayed_steps > before
            tokens = steps.send(logits[0][:, 0])
        steps.close()
        return found, count

    wanted, none = search("cpu")
    with pretend():
        found, replayed = search("cuda")
    assert replayed >= 10 > none
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recall", ["stream", "stage", "ondemand"])
def test_rows_that_are_being_written_are_not_copied_up_with_their_neighbours(recall: str) -> None:
    """Runs of rows are joined into one copy over gaps, and pages cross whole, while rows of theirs
    may be on their way to DDR."""
    settings = {"interval": "2", "recent": "8", "pin_prompt": "false"}
    with pretend():
        source = RandomSource(VOCAB, 24, 60, 60)
        model = tiny_model().to("cuda")
        setup = SearchSetup(model, source, lambda: make_search("linear"), 0.0, 0, 60)
        one = PolicySearch(
            setup, source.problem(0), build("hierarchy", settings), 30, CacheOptions(recall=recall)
        )
        steps = one.steps()
        tokens = next(steps)
        for _ in range(58):
            tokens = steps.send(run_together([one.prepare(tokens)])[0][:, 0])
        assert one.cache.pools[Place.DDR].slots.total > 10
        steps.close()
