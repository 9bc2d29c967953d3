"""Attention kept by plans that differ between layers or heads, against nested loops."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from arborsim.cli.app import main
from arborsim.core.events import TokenRun
from arborsim.core.observations import DenseRows, LayerRows, Observations, Signal
from arborsim.core.tiers import Budget, Tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.memory.moves import ALL_GROUPS, Moves
from arborsim.play.controller import Controller
from arborsim.play.meters import AttentionKept, Quality
from arborsim.play.results import aggregate
from arborsim.policies.registry import build
from arborsim.products.replay.report import report_of
from arborsim.products.replay.run import Replay
from arborsim.products.replay.tables import to_frame, to_json
from arborsim.report.report import html
from arborsim.report.text import print_report
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, decide_all
from tests.helpers.traces import make_trace

TIERS = np.array(Tier)


@dataclass
class Rows:
    """Written-out rows of heads."""

    kv_heads: int
    rows: list[np.ndarray]  # float32 [layers, heads, position + 1] each

    def row(self, i: int) -> np.ndarray:
        return self.rows[i]

    def query(self, i: int) -> np.ndarray:
        raise AssertionError("attention kept needs rows only")


def observed(rows: list[np.ndarray], kv_heads: int) -> Observations:
    """The rows of heads, and the mean row of them all and those of layers made from them."""
    known = [max(1, np.count_nonzero(~np.isnan(row[..., 0]))) for row in rows]
    means = [np.nansum(row, axis=(0, 1)) / count for row, count in zip(rows, known, strict=True)]
    ends = np.cumsum([0, *map(len, means)])
    layers = [np.stack([row.mean(1), row.var(1)], axis=1).astype(np.float16) for row in rows]
    layer_ends = np.cumsum([0, *(each.size for each in layers)])
    return Observations(
        len(rows),
        DenseRows(np.concatenate(means), ends),
        layer_attention=LayerRows(
            tuple(range(len(rows[0]))),
            np.concatenate([each.ravel() for each in layers]),
            layer_ends,
        ),
        head_attention=Rows(kv_heads, rows),
    )


def chain(prompt: int, generated: int) -> ThoughtTree:
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append((0,), prompt)
    tree.open(1, 0)
    tree.append((1,), generated)
    return tree


def test_heads_that_keep_all_they_read_lose_nothing() -> None:
    """One reads even tokens, the other odd ones, and each has evicted those it does not read."""
    prompt, generated = 12, 8
    rows = []
    for position in range(prompt, prompt + generated):
        row = np.zeros((1, 2, position + 1), dtype=np.float32)
        for head in (0, 1):
            row[0, head, head::2] = 1 / len(row[0, head, head::2])
        rows.append(row)
    tier = np.zeros((2, prompt), dtype=np.int8)
    tier[0, 1::2] = tier[1, 0::2] = Tier.EVICTED
    run = TokenRun((1,), generated, np.zeros(generated, np.int32), observed(rows, 2))
    meter = AttentionKept(Signal.HEAD_ATTENTION)
    meter.ran(run, chain(prompt, generated), tier, Moves.none())
    assert meter.share == 1.0
    swapped = AttentionKept(Signal.HEAD_ATTENTION)
    swapped.ran(run, chain(prompt, generated), tier[::-1], Moves.none())
    lost = [
        prompt / 2 / np.count_nonzero(row[0, head]) for row in rows for head in (0, 1)
    ]  # what is not evicted is what was generated
    assert swapped.share == pytest.approx(1 - np.mean(lost), abs=1e-7)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), dtype=np.float32)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), per=st.sampled_from(["layer", "head"]), width=st.integers(1, 3),
    broken=st.booleans(), of_layers=st.booleans(),
)  # fmt: skip
def test_kept_is_what_nested_loops_say(
    seed: int, per: str, width: int, broken: bool, of_layers: bool
) -> None:
    rng = np.random.default_rng(seed)
    layers, kv_heads, queries = (int(n) for n in rng.integers(1, 4, 3))
    groups = layers * (kv_heads if per == "head" else 1)
    of_layers = of_layers and per == "layer"
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append((0,), int(rng.integers(1, 9)))
    meter = AttentionKept(Signal.LAYER_ATTENTION if of_layers else Signal.HEAD_ATTENTION)
    tier = np.zeros((groups, tree.num_tokens), dtype=np.int8)
    kept: list[float] = []
    for _ in range(4):
        leaves, older = [], len(tree)
        for _ in range(int(rng.integers(1, width + 1))):
            leaves.append(len(tree))
            tree.open(len(tree), int(rng.integers(0, older)))
        born, steps = tree.num_tokens, int(rng.integers(1, 6))
        tier = np.where(rng.random(tier.shape) < 0.6, rng.choice(TIERS, tier.shape), tier)
        tier = tier.astype(np.int8)
        tree.append(tuple(leaves), steps)
        rows = []
        for token in range(born, tree.num_tokens):
            length = sum(t <= token for t in tree.path(int(tree.node_of_token.values[token])))
            row = softmax(rng.normal(size=(layers, kv_heads * queries, length)) * 3)
            if broken and rng.random() < 0.3:
                row[rng.integers(layers), rng.integers(row.shape[1])] = np.nan
            rows.append(row)
        run = TokenRun(
            tuple(leaves), steps, np.zeros(len(rows), np.int32), observed(rows, kv_heads)
        )
        moves = random_moves(rng, tier, steps, len(leaves))
        meter.ran(run, tree, tier, moves)
        after = np.concatenate([tier, np.zeros((groups, len(rows)), np.int8)], axis=1)
        for step in range(steps):
            for w, leaf in enumerate(leaves):
                own = rows[step * len(leaves) + w]
                path = tree.path(leaf).tolist()[: own.shape[2]]
                for group in range(groups):
                    layer, head = divmod(group, kv_heads) if per == "head" else (group, None)
                    kept += literal(own[layer], after[group], path, head, queries, of_layers)
            for at, group, token, target in zip(
                moves.step, moves.group, moves.token, moves.target, strict=True
            ):
                if at == step:
                    after[slice(None) if group == ALL_GROUPS else group, token] = target
        tier = after
    expected = sum(kept) / len(kept) if kept else math.nan
    # Rows of layers are stored in float16.
    assert meter.share == pytest.approx(expected, abs=2e-3 if of_layers else 1e-6, nan_ok=True)


def literal(
    row: np.ndarray, tier: np.ndarray, path: list[int], head: int | None, queries: int, mean: bool
) -> list[float]:
    """What a group keeps of one query's attention: a number, or none if no head has numbers."""
    heads = range(len(row)) if head is None else range(head * queries, (head + 1) * queries)
    lost = []
    for h in heads:
        total = 0.0
        for position, token in enumerate(path):
            if tier[token] == Tier.EVICTED:
                total += float(row[h, position])
        if not any(math.isnan(weight) for weight in row[h].tolist()):
            lost.append(total)
        elif mean:  # the mean row of a layer is recorded, and is not a number either
            return []
    return [1 - sum(lost) / len(lost)] if lost else []


def random_moves(rng: np.random.Generator, tier: np.ndarray, steps: int, width: int) -> Moves:
    """Moves inside a run of tokens that exist by then, no (group, token) twice, none evicted."""
    found = []
    groups, born = tier.shape
    there = np.ones((groups, born + steps * width), dtype=bool)
    there[:, :born] = tier != Tier.EVICTED
    for token in rng.permutation(born + steps * width)[: int(rng.integers(0, 8))].tolist():
        first = max(0, (token - born) // width) if token >= born else 0
        step = int(rng.integers(first, steps))
        target = int(rng.choice([Tier.EVICTED, Tier.EVICTED, Tier.DDR, Tier.HBM_QUANTISED]))
        if there[:, token].all() and rng.random() < 0.3:
            found.append((step, ALL_GROUPS, token, target))
        else:
            some = rng.permutation(groups)[: int(rng.integers(1, groups + 1))].tolist()
            found += [(step, group, token, target) for group in some if there[group, token]]
    found.sort(key=lambda move: move[0])
    columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return Moves(columns[0], columns[1].astype(np.int32), columns[2], columns[3].astype(np.int8))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), per=st.sampled_from(["layer", "head"]))
def test_one_plan_for_all_groups_keeps_what_the_mean_row_says(seed: int, per: str) -> None:
    rng = np.random.default_rng(seed)
    layers, kv_heads, queries, prompt, generated = (int(n) for n in rng.integers(1, 5, 5))
    rows = [
        softmax(rng.normal(size=(layers, kv_heads * queries, prompt + step + 1)) * 3)
        for step in range(generated)
    ]
    run = TokenRun((1,), generated, np.zeros(generated, np.int32), observed(rows, kv_heads))
    tier = rng.choice(TIERS, (1, prompt)).astype(np.int8)
    groups = layers * (kv_heads if per == "head" else 1)
    moves = random_moves(rng, tier, generated, 1)
    moves = Moves(moves.step, np.full_like(moves.group, ALL_GROUPS), moves.token, moves.target)
    shares = []
    for meter, tiers in (
        (AttentionKept(), tier),
        (AttentionKept(Signal.HEAD_ATTENTION), tier.repeat(groups, axis=0)),
    ):
        meter.ran(run, chain(prompt, generated), tiers, moves)
        shares.append(meter.share)
    assert shares[1] == pytest.approx(shares[0], abs=1e-6)


def vector_trace(folder: Path, **shape: object) -> Path:
    shape = {"prompt": 9, "nodes": 8, "block": (2, 8), "layers": 3, "qkv_layers": (0, 2), **shape}
    return make_trace(folder / "x.parquet", episodes=1, capture="qkv", **shape)  # type: ignore[arg-type]


def share_of(path: Path, name: str, per: str) -> float:
    reader, policy = TraceReader(path), build(name, {"per": per})
    quality = Quality.of(reader)
    needs = quality.reads([per]) | policy.reads()
    episode: Episode = next(iter(reader.episodes(sorted(needs))))
    rows = quality.rows(policy.grouping)
    assert rows is Signal.HEAD_ATTENTION
    meter, groups = AttentionKept(rows), {"layer": 2, "head": 4}[per]
    Controller(
        policy, PlainExecutor(groups), budget_tokens=int(0.6 * episode.num_tokens), layers=3,
        vocabulary=128, meters=[meter],
    ).run(play(episode))  # fmt: skip
    return meter.share


@pytest.mark.parametrize("per", ["layer", "head"])
@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_sparse_means_do_not_change_what_groups_keep(tmp_path: Path, kind: str, per: str) -> None:
    shares = []
    for attention in ("dense", "sparse", "none"):
        (folder := tmp_path / attention).mkdir()
        path = vector_trace(folder, kind=kind, attention=attention, attention_top=3)
        shares.append(share_of(path, "tova", per))
    assert 0 < shares[0] < 1
    assert shares[0] == shares[1] == shares[2]


@pytest.mark.parametrize("per", ["layer", "head"])
def test_oracles_of_groups_need_no_mean_rows(tmp_path: Path, per: str) -> None:
    shares = []
    for attention in ("dense", "none"):
        (folder := tmp_path / attention).mkdir()
        path = vector_trace(folder, kind="tree", attention=attention)
        job = Replay(
            [path], [build("oracle", {"per": per})], [Budget.parse("0.6")],
            Machine(load_profile("h100")),
        )  # fmt: skip
        (result,) = job.run().episodes
        assert result.policy == f"oracle-{per}"
        shares.append(result.attention_kept)
    assert 0.6 < shares[0] == shares[1] <= 1


def without_queries(path: Path) -> Path:
    """The same trace as if it had been recorded without queries."""
    table = pq.read_table(path)
    at = table.schema.get_field_index("queries")
    field = table.schema.field(at)
    bare = table.set_column(at, field, pa.nulls(len(table), field.type))
    pq.write_table(bare.replace_schema_metadata(table.schema.metadata), path)
    return path


@pytest.mark.parametrize("per", ["layer", "head"])
def test_what_a_trace_does_not_tell_is_not_a_number(tmp_path: Path, per: str) -> None:
    path = without_queries(vector_trace(tmp_path, kind="linear"))
    job = Replay(
        [path], [build("full"), build("oracle"), build("key-norm", {"per": per}), build("random")],
        [Budget.parse("0.9")], Machine(load_profile("h100")),
    )  # fmt: skip
    result = job.run()
    rows = {row.policy: row for row in aggregate(result.episodes)}
    assert math.isnan(rows["key-norm"].attention_kept)
    assert rows["key-norm"].kept_note == f"not known per {per}"
    assert math.isnan(rows["key-norm"].oracle_gap)
    assert rows["random"].attention_kept < 1
    assert rows["random"].oracle_gap >= 0
    (line,) = [note for note in result.notes if "not known" in note]
    assert line == (
        f"Attention kept of key-norm is not known per {per}: record the trace with --capture qkv "
        "--qkv-layers all."
    )


@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_rows_of_layers_tell_what_layers_keep(tmp_path: Path, kind: str) -> None:
    """The helper stores the mean row for every layer: each layer's share is that of the mean."""
    shares = []
    for layers in ((0, 2), (0, 1, 2)):
        (folder := tmp_path / str(len(layers))).mkdir()
        path = without_queries(vector_trace(folder, kind=kind, attention_layer_ids=layers))
        policy = build("key-norm", {"per": "layer"})
        job = Replay([path], [policy], [Budget.parse("0.7")], Machine(load_profile("h100")))
        (result,) = job.run().episodes
        shares.append((result.attention_kept, result.kept_note))
        reader = TraceReader(path)
        assert Quality.of(reader).rows("head") is None
    assert 0 < shares[0][0] < 1
    assert shares[0][1] == ""
    assert math.isnan(shares[1][0])  # rows of other layers than those whose vectors are kept
    assert shares[1][1] == "not known per layer"
    episode = next(iter(TraceReader(tmp_path / "2" / "x.parquet").episodes([
        Signal.ATTENTION, Signal.KEYS,
    ])))  # fmt: skip
    tiers, _ = decide_all(policy, episode, int(0.7 * episode.num_tokens), 1)
    each = [np.array(after).reshape(2, -1) for after in tiers]
    assert shares[0][0] == pytest.approx(mean_share(episode, each), abs=2e-3)


def mean_share(episode: Episode, each: list[np.ndarray]) -> float:
    """Share of the mean rows on what each group has, after each event; mean over groups."""
    tree, kept, before = ThoughtTree(), [], np.zeros((2, 0), dtype=np.int8)
    parent = dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))
    node = episode.node[episode.token_rows].tolist()
    born = 0
    for after in each:
        for token in range(born, after.shape[1]):
            while len(tree) <= node[token]:
                tree.open(len(tree), parent[len(tree)])
            tree.append((node[token],), 1)
            if node[token] == 0:
                continue
            path, row = tree.path(node[token]), episode.attention.row(token)
            old = path < before.shape[1]
            for group in before:
                gone = group[path[old]] == Tier.EVICTED
                kept.append(1 - float(row[old][gone].sum()))
        born, before = after.shape[1], after
    return float(np.mean(kept))


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("view", ["table", "matrix"])
def test_tables_say_what_is_not_known(tmp_path: Path, width: int, view: str) -> None:
    path = without_queries(vector_trace(tmp_path, kind="tree", nodes=30))
    policies = [build("oracle"), build("key-norm", {"per": "head"}), build("random")]
    result = Replay(
        [path], [build("full"), *policies, build("hierarchy", {"interval": "4", "recent": "2"})],
        [Budget.parse("0.9"), Budget.parse("0.7")], Machine(load_profile("h100")),
    ).run()  # fmt: skip
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False)
    print_report(report_of(result, view=view), console, notes=True)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for words in ("not known", "per head"):
        assert text.getvalue().count(words) >= 2
    assert "Attention kept of key-norm is not known per head: record" in " ".join(lines)
    (row, *_) = (r for r in json.loads(to_json(result))["rows"] if r["policy"] == "key-norm")
    assert (row["attention_kept"], row["kept_note"]) == (None, "not known per head")
    frame = to_frame(result).set_index("policy")
    assert (frame.loc["key-norm", "attention_kept_note"] == "not known per head").all()
    assert (frame.loc["random", "attention_kept_note"] == "").all()
    assert "not known per head" in html(report_of(result))


def test_each_kind_of_groups_has_its_own_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = vector_trace(tmp_path, kind="linear")
    command = ["replay", str(path), "--policy", "tova,key-norm,random", "--budget", "0.8"]
    assert main([*command, "--json"]) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    kinds = {"tova": "layer", "key-norm": "head", "random": "shared"}
    names = {"shared": "oracle", "layer": "oracle-layer", "head": "oracle-head"}
    assert set(rows) == {"full", *kinds, *names.values()}
    for policy, per in kinds.items():
        bound = rows[names[per]]
        assert rows[policy]["per"] == bound["per"] == per
        gap = bound["attention_kept"] - rows[policy]["attention_kept"]
        assert rows[policy]["oracle_gap"] == pytest.approx(gap, abs=1e-12)
        assert gap > -1e-6
    assert main([*command, "--notes"]) == 0
    assert "the gap is to oracle-layer or oracle-head" in " ".join(capsys.readouterr().out.split())
