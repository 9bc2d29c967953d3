"""Policies are found by name, and only what is asked for is imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.machine.operations import TIMES, parsed
from arborsim.policies import methods, registry
from arborsim.policies.base import CacheView, Method, Policy, Protection
from arborsim.policies.methods.attention import H2O
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.rolling import HiddenChangeContrast
from arborsim.signals.scores import Score
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import decide_all
from tests.helpers.traces import make_info, make_trace

_TEXTS = {"summary", "paper", "official", "formula", "operations", "words", "deviations"}


def test_texts_of_methods_are_those_of_classes_that_exist() -> None:
    kinds: dict[str, type[Policy]] = {}
    for kind in registry.available().values():
        kinds |= {each.__name__: each for each in kind.__mro__ if issubclass(each, Policy)}
    texts = tomllib.loads((Path(registry.__file__).parent / "methods.toml").read_text())
    phrases = texts.pop("phrases")
    assert texts.keys() <= kinds.keys()
    for name, section in texts.items():
        assert kinds[name].__module__.startswith(methods.__name__)
        assert section.keys() <= _TEXTS
        assert section.get("words", {}).keys() <= {each.name for each in fields(Method)}
        assert kinds[name].formula != "-" or kinds[name].name in ("", "full")
    said = [section.get("official", "") for section in texts.values()]
    said += [each for section in texts.values() for each in section.get("deviations", [])]
    used = {each[1:].partition(" ")[0] for each in said if each.startswith("@")}
    assert used == phrases.keys()


def test_every_published_method_declares_operations_that_are_known() -> None:
    """Bounds and full retention aside, which no engine runs anything for."""
    for name in registry.MODULES.keys() - {"full", "needed", "oracle"}:
        kind = registry.find(name)
        assert kind.operations, name
        assert kind.operations.keys() <= set(TIMES)
        assert all(map(parsed, kind.operations.values()))


def test_a_text_of_ones_own_wins_and_others_are_inherited() -> None:
    class Mine(H2O):
        name = "mine"
        summary = "of my own"

    assert (Mine.summary, Mine.formula) == ("of my own", H2O.formula)
    assert Mine().method.deviations == H2O.deviations
    assert Policy.formula == "-"


def test_the_table_names_every_policy_in_every_file() -> None:
    found = {}
    for file in sorted(Path(methods.__path__[0]).glob("[!_]*.py")):
        module = __import__(f"arborsim.policies.methods.{file.stem}", fromlist=["_"])
        for item in vars(module).values():
            own = isinstance(item, type) and item.__module__ == module.__name__
            if own and issubclass(item, Policy) and item.name:
                found[item.name] = file.stem
    assert found == registry.MODULES
    assert list(registry.available()) == list(registry.names())
    for name, kind in registry.available().items():
        assert kind.name == name


def test_a_name_alone_is_the_form_of_its_authors() -> None:
    assert registry.values_of(registry.build("h2o")).items() >= {
        "per": "head", "recent_share": 0.5, "pin_prompt": False, "count_prompt": True
    }.items()  # fmt: skip
    assert registry.values_of(registry.build("raas"))["variant"] == "pages"
    per = {
        name: registry.parameters(kind).get("per") for name, kind in registry.available().items()
    }
    shared = {name for name, each in per.items() if each and each.default == "shared"}
    assert shared == {"oracle"}, "a bound, which is run for every kind of groups"


@pytest.mark.parametrize("name", ["h2o", "epikv", "arborkv", "rkv"])
def test_finding_one_imports_no_other(name: str) -> None:
    program = (
        "import sys; from arborsim.policies.registry import build; "
        f"build('{name}'); print(*(m for m in sys.modules if '.methods.' in m))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert run.stdout.split() == [f"arborsim.policies.methods.{registry.MODULES[name]}"]


@pytest.mark.parametrize("kind", ["linear", "tree"])
@pytest.mark.parametrize("per", ["layer", "head"])
def test_policies_with_groups_replay_one_layer_with_one_kv_head(
    kind: str, per: str, tmp_path: Path
) -> None:
    info = make_info(3, "qkv", qkv_layers=(1,))
    info = replace(info, geometry=replace(info.geometry, kv_heads=1))
    path = make_trace(tmp_path / "x.parquet", episodes=1, kind=kind, prompt=20, info=info)
    reader = TraceReader(path)
    names = [
        name
        for name in registry.names()
        if registry.build(name).grouping != "shared"
        and all(reader.has(signal) for signal in registry.build(name).reads())
    ]
    assert len(names) > 8
    command = ["replay", str(path), "--policy", ",".join(names), "--budget", "0.5"]
    assert main([*command, "--set", f"per={per}", "--no-oracle"]) == 0


@dataclass(frozen=True)
class NamedBlocks(StreamPolicy):
    """Says what its blocks are."""

    name: ClassVar[str] = "named"
    score: ClassVar[Score] = HiddenChangeContrast(layer_a=0.8, layer_b=0.5)


@dataclass(frozen=True)
class GivenParts(StreamPolicy):
    """Says the same by what the blocks amount to."""

    recent: int = setting(128, "protected newest tokens", unit="tokens", low=1)

    name: ClassVar[str] = "given"
    method: ClassVar[Method] = Method("s(t) = z_A(t) - z_B(t)", score="a contrast")
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HIDDEN_CHANGE})

    def scores(self) -> dict[str, Score]:
        return {"late": HiddenChangeContrast(layer_a=0.8, layer_b=0.5)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(pin_prompt=True, recent=min(self.recent, budget_tokens // 4))

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["late"]


@pytest.mark.parametrize("max_steps", [1, None])
def test_a_policy_can_give_scores_protection_and_rank_itself(
    tmp_path: Path, max_steps: int | None
) -> None:
    path = make_trace(tmp_path / "x.parquet", episodes=1, kind="tree", prompt=12, nodes=10)
    episode = next(iter(TraceReader(path).episodes((Signal.HIDDEN_CHANGE,))))
    budget = int(0.6 * episode.num_tokens)
    one, other = (
        decide_all(policy, episode, budget, max_steps=max_steps)[0]
        for policy in (NamedBlocks(), GivenParts())
    )
    assert one == other
    assert GivenParts().reads() == NamedBlocks().reads() == {Signal.HIDDEN_CHANGE}
    assert GivenParts().fused
