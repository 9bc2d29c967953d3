"""Every supported family recorded and run live says what transformers says of it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.core.errors import UsageError
from arborsim.core.tiers import Budget
from arborsim.machine.config import geometry_from_config
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.play.backends import LiveRequest
from arborsim.play.episode import Cell
from arborsim.play.move_log import MoveLog
from arborsim.policies.registry import build
from arborsim.products.calibrate.backend import HardwareRequest
from arborsim.searches import make_search
from arborsim.trace.reader import TraceReader
from arborsim_torch.backend import TorchBackend
from arborsim_torch.batches import run_batched
from arborsim_torch.checkpoint import FAMILIES as SUPPORTED
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.hardware.model import load_for_timing
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup, make_controller
from arborsim_torch.models import LoadedModel, cache_shape, geometry, load_model, rope_of
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.sampling import Sampler
from tests.helpers.plain_executor import decide_all
from tests.live.test_shadow import Collect
from tests.live.tiny import FAMILIES, FakeSource, plain_copy, save_tiny, tiny_model, torch


def generated(model: Any, prompt: Any, count: int) -> tuple[list[int], Any]:
    """Greedy tokens of transformers' own generation, with eager attention, and their logits."""
    ids = torch.tensor([prompt])
    made = plain_copy(model).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_runs_equal_transformers(family: str) -> None:
    """Recorded, and live under a policy that has nothing to evict: tokens, and log-probabilities
    to 1e-4 in float32."""
    model, source = tiny_model(family), FakeSource(thoughts=6)
    problem = source.problem(0)
    recorded = EpisodeRecorder(
        model, source, make_search("linear"), None, Sampler(0.0, (0,)), 0, 100
    ).run(problem)
    setup = SearchSetup(model, source, lambda: make_search("linear"), 0.0, 0, 100)
    live: list[Any] = []
    searches = [PolicySearch(setup, problem, build("h2o", {}), 200, CacheOptions())]
    run_batched(searches, 1, lambda search, ended: live.append(ended))
    tokens, logits = generated(model, problem.prompt, recorded.tokens)
    scores = torch.log_softmax(logits.float(), -1).max(-1).values.numpy()
    for result in (recorded, live[0]):
        own = result.columns["position"] >= len(problem.prompt)
        assert result.columns["token"][own].tolist() == tokens
        np.testing.assert_allclose(result.columns["logprob"][own], scores, atol=1e-4)


def test_every_supported_family_is_tested() -> None:
    tested = {tiny_model(family).config.model_type for family in FAMILIES}
    assert tested | {"gemma3"} == set(SUPPORTED)


def test_of_a_model_that_sees_the_language_model_runs(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = tiny_model("gemma3").config
    vision = SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                num_attention_heads=2, image_size=28, patch_size=14)  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(config).eval()
    save_tiny(tmp_path)  # for its tokeniser
    whole.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert geometry(loaded).layers == text.num_hidden_layers
    tokens = FakeSource().problem(0).prompt
    ids = torch.tensor([tokens])
    with torch.no_grad():
        expected = whole(ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    found = TreeDecoder(loaded.model).prefill(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "llama"])
def test_the_geometry_of_a_mixture_knows_its_experts(family: str) -> None:
    model = tiny_model(family)
    found = geometry(LoadedModel("m", model))
    text = json.dumps(model.config.to_dict() | {"dtype": "float32"})
    known = geometry_from_config(text, "m", "config.json")
    assert replace(found, window=known.window, window_layers=known.window_layers) == known
    assert found.experts == (0 if family == "llama" else 4)


@pytest.mark.parametrize("family", ["gemma3", "mixtral", "qwen3_moe"])
def test_what_reads_a_part_of_itself_is_not_timed(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_model(family).config.to_dict()))
    request = HardwareRequest(model=f"config:{tmp_path / 'config.json'}", device="cpu")
    with pytest.raises(UsageError, match="choose a dense model"):
        load_for_timing(request)


def test_longrope_ends_where_keys_would_change() -> None:
    """Beyond its first training length Phi-3 turns all keys anew, those that are cached, too."""
    assert LoadedModel("m", tiny_model("phi3-longrope")).max_positions == 1024
    assert LoadedModel("m", tiny_model("phi3")).max_positions == 2048


@pytest.mark.parametrize("family", ["gemma3", "phi3-longrope"])
def test_policies_that_turn_keys_are_refused(family: str) -> None:
    model = tiny_model(family)
    assert rope_of(model) is None
    policy: Any = build("expected-attention", {})
    executor: Any = None
    with pytest.raises(UsageError, match="RoPE of this model changes"):
        make_controller(policy, executor, 10, model, cache_shape(model), ())


def test_a_part_of_the_channels_is_turned() -> None:
    rope = rope_of(tiny_model("phi3"))
    assert rope is not None
    assert rope.rotary_dim == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_true_buffers(family: str, tmp_path: Path) -> None:
    """What a model computes besides its weights (RoPE, scales) is what a stored one has."""
    model = tiny_model(family)
    config = model.config.to_dict() | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drawn = load_model(f"config:{tmp_path / 'config.json'}").model
    known = dict(model.named_buffers())
    found = dict(drawn.named_buffers())
    assert found.keys() == known.keys()
    for name, buffer in found.items():
        torch.testing.assert_close(buffer, known[name], msg=name)
    assert torch.isfinite(drawn(torch.tensor([[1, 2, 3]])).logits).all()


def test_what_no_window_reads_may_go(tmp_path: Path) -> None:
    """All layers see 24 tokens: a policy that keeps more of the newest changes nothing."""
    model, source = tiny_model("phi3"), FakeSource(thoughts=10)
    setup = SearchSetup(model, source, lambda: make_search("linear"), 0.0, 0, 100)
    problem = source.problem(0)
    policy = build("streaming-llm", {"pin_prompt": "false"})
    search = PolicySearch(setup, problem, policy, 40, CacheOptions())
    ended: list[Any] = []
    run_batched([search], 1, lambda search, result: ended.append(result))
    measured = search.outcome(ended[0]).measured
    assert measured.evicted_tokens > 50
    tokens, _ = generated(model, problem.prompt, ended[0].tokens)
    own = ended[0].columns["position"] >= len(problem.prompt)
    assert ended[0].columns["token"][own].tolist() == tokens


@pytest.mark.parametrize("family", ["gemma3", "phi3", "mixtral"])
def test_shadow_runs_decide_as_replays_do(family: str, tmp_path: Path) -> None:
    # The token that ends a text is none that the model can say.
    folder = save_tiny(tmp_path / "model", family, eos_token="</s>")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": " ".join(f"w{i}" for i in range(2, 40))}))
    small = {"epikv": {"recent": "8"}, "snapkv": {"window": "8"}}
    names = ("h2o", "epikv", "snapkv", "lag-kv", "streaming-llm", "quest")
    policies = [build(name, small.get(name, {})) for name in names]
    request = LiveRequest(
        model=str(folder), prompts=prompts,
        cells=tuple(Cell(policy, Budget.parse("72")) for policy in policies),
        max_tokens=100, thought_tokens=20, shadow=True,
        machine=Machine(load_profile("h100")), trace=tmp_path / "shadow.parquet",
    )  # fmt: skip
    logs: dict[str, MoveLog] = defaultdict(MoveLog)
    watch, backend = Collect(), TorchBackend()
    backend.live(request, watch, meters=lambda episode, cell: (logs[cell.policy.name],))
    needs = frozenset().union(*(policy.reads() for policy in policies))
    episode = next(iter(TraceReader(tmp_path / "shadow.parquet").episodes(tuple(needs))))
    moved = 0
    for policy in policies:
        (decided,) = (r for r in watch.results if r.policy == policy.name)
        assert not decided.infeasible
        _, expected = decide_all(policy, episode, decided.budget_tokens)
        np.testing.assert_array_equal(logs[policy.name].rows, expected, err_msg=policy.name)
        moved += len(expected) > 0
    assert moved >= 5
