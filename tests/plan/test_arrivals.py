"""Which searches arrive and when: draws by weight, Poisson is Poisson, loads scale exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from arborsim.cli.app import main
from arborsim.core.errors import ArborsimError
from arborsim.products.generate.arrivals import (
    ClientLoop,
    Poisson,
    Recorded,
    draw_mix,
    read_arrivals,
)
from tests.trace.import_helpers import recording

SIGNIFICANCE = 1e-3
#: Two bursts of three, ten seconds apart: 5 gaps in 10.2 s.
BURSTS = Recorded((0.0, 0.1, 0.2, 10.0, 10.1, 10.2))


def times(process: Poisson | Recorded, load: float, count: int, seed: int = 0) -> np.ndarray:
    found = process.at(load, count, seed)
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("rate", [0.05, 3.0, 400.0])
def test_poisson_has_its_rate_and_exponential_gaps(rate: float) -> None:
    count = 5000
    found = times(Poisson(), rate, count)
    gaps = np.diff(found, prepend=0.0)
    assert stats.kstest(gaps, stats.expon(scale=1 / rate).cdf).pvalue > SIGNIFICANCE
    assert stats.kstest(gaps, stats.expon(scale=1.1 / rate).cdf).pvalue < SIGNIFICANCE
    # The moment of the n-th arrival is gamma distributed.
    low, high = stats.gamma(count, scale=1 / rate).ppf([0.0005, 0.9995])
    assert low < found[-1] < high
    # Counts in windows of ten mean gaps have the variance of their mean.
    counts = np.bincount((found * rate / 10).astype(int))[:-1]
    assert counts.var(ddof=1) / counts.mean() == pytest.approx(1, abs=0.25)


def test_poisson_gaps_do_not_depend_on_each_other() -> None:
    gaps = np.diff(times(Poisson(), 1.0, 5000))
    assert stats.spearmanr(gaps[1:], gaps[:-1]).pvalue > SIGNIFICANCE


def test_seeds_and_loads_of_poisson() -> None:
    assert (times(Poisson(), 2.0, 50) == times(Poisson(), 2.0, 50)).all()
    assert (times(Poisson(), 2.0, 50, seed=1) != times(Poisson(), 2.0, 50)).all()
    # Another load is the same pattern, and fewer arrivals are the beginning of more.
    np.testing.assert_array_equal(times(Poisson(), 4.0, 50) * 2, times(Poisson(), 2.0, 50))
    np.testing.assert_array_equal(times(Poisson(), 4.0, 50)[:20], times(Poisson(), 4.0, 20))


def test_a_log_at_its_own_load_is_the_log_from_some_arrival_on() -> None:
    assert BURSTS.rate_per_s == 5 / 10.2
    assert BURSTS.stated == BURSTS.rate_per_s
    assert Recorded(BURSTS.moments_s, scale=3.0).stated == pytest.approx(15 / 10.2)
    # Its five gaps, and the mean gap before it begins again.
    cycle = [0.1, 0.1, 9.8, 0.1, 0.1, 10.2 / 5]
    begun = set()
    for seed in range(40):
        found = times(BURSTS, BURSTS.rate_per_s, 14, seed)
        assert found[0] == 0
        gaps = np.diff(found)
        fits = [i for i in range(6) if np.allclose(gaps, np.resize(cycle[i:] + cycle[:i], 13))]
        assert len(fits) == 1
        begun |= set(fits)
    assert begun == set(range(6))  # every arrival can be the first


logs = st.lists(st.floats(0.001, 1e4), min_size=1, max_size=20).map(
    lambda gaps: Recorded((0.0, *np.cumsum(gaps).tolist()))
)


@given(logs, st.floats(1e-3, 1e3), st.integers(1, 70), st.integers(0, 5))
def test_scaling_stretches_every_gap_by_one_factor(
    log: Recorded, load: float, count: int, seed: int
) -> None:
    natural, scaled = times(log, log.rate_per_s, count, seed), times(log, load, count, seed)
    assert (np.diff(scaled) >= 0).all()
    np.testing.assert_allclose(scaled * load, natural * log.rate_per_s, rtol=1e-12)
    # Whole rounds take exactly as long as the load says, however bursty they are.
    n = len(log.moments_s)
    rounds = times(log, load, 3 * n + 1, seed)
    np.testing.assert_allclose(rounds[::n] * load, np.arange(4) * n, rtol=1e-9, atol=1e-9)


def test_bursts_stay_bursts_at_any_load() -> None:
    def variation(load: float) -> float:
        gaps = np.diff(times(BURSTS, load, 600))
        return float(gaps.std() / gaps.mean())

    assert variation(0.01) == pytest.approx(variation(100.0), rel=1e-9)
    assert variation(1.0) > 1.5  # Poisson has 1


def test_a_closed_loop_is_its_clients() -> None:
    loop = ClientLoop(8, think_s=2.5)
    assert loop.stated == 8
    assert loop.at(3.0, 100, 0) == ClientLoop(3, 2.5)
    assert loop.at(0.2, 100, 0) == ClientLoop(1, 2.5)


MOONCAKE = [{"timestamp": 1000 * t, "input_length": 20, "output_length": 2, "hash_ids": [1]}
            for t in (7, 3, 3, 9)]  # fmt: skip
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{s:06.3f},30,4\n" for s in (46.25, 47.0, 50.25)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, MOONCAKE)))
    (tmp_path / "a.csv").write_text(AZURE)
    return tmp_path


def test_raw_logs_and_traces_made_from_them_say_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = read_arrivals(folder / "m.jsonl", "mooncake", scale=2.0)
    assert raw == Recorded((0.0, 0.0, 4.0, 6.0), 2.0)
    assert main(["import", "mooncake", "m.jsonl", "m.parquet"]) == 0
    capsys.readouterr()
    assert read_arrivals(folder / "m.parquet", scale=2.0) == raw
    azure = read_arrivals(folder / "a.csv")
    assert azure.moments_s == pytest.approx((0.0, 0.75, 4.0), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("odd.jsonl", "", "odd.jsonl: no known log of requests (columns when)"),
        ("bare.jsonl", "", "bare.jsonl: the log has no arrivals"),
        ("m.jsonl", "moonshot", "unknown format of arrivals 'moonshot': did you mean mooncake?"),
        ("m.jsonl", "azure", "m.jsonl, line 1: ContextTokens is missing"),
        ("no.jsonl", "mooncake", "no.jsonl: cannot be read"),
        ("no.parquet", "", "no.parquet"),
        ("bad.jsonl", "mooncake", "bad.jsonl, line 2: this is not JSON"),
        ("one.jsonl", "mooncake", "its arrivals (1) are all at one moment"),
        ("same.jsonl", "mooncake", "its arrivals (3) are all at one moment"),
        ("chain.parquet", "", "the trace has no arrivals"),
    ],
)
def test_what_has_no_arrivals(name: str, format: str, message: str, folder: Path) -> None:
    line = json.dumps(MOONCAKE[0])
    (folder / "odd.jsonl").write_text('{"when": 1}')
    (folder / "bare.jsonl").write_text('{"input_length": 5, "output_length": 2}')
    (folder / "bad.jsonl").write_text(f"{line}\n{{\n")
    (folder / "one.jsonl").write_text(line)
    (folder / "same.jsonl").write_text("\n".join([line] * 3))
    options = "--searches 1 --depth 1 --prompt-tokens 3 --thought-tokens 2 --out chain.parquet"
    assert main(["generate", *options.split()]) == 0
    with pytest.raises(ArborsimError) as caught:
        read_arrivals(folder / name, format)
    assert message in str(caught.value)


def test_mooncakes_own_log() -> None:
    found = read_arrivals(recording("mooncake-conversation.jsonl"), "mooncake")
    count = len(found.moments_s)
    assert found.moments_s[0] == 0
    doubled = np.diff(times(found, 2 * found.rate_per_s, count + 1)) * 2
    # A whole round has every gap of the log, wherever it begins, and one mean gap.
    recorded = [*np.diff(found.moments_s), 1 / found.rate_per_s]
    np.testing.assert_allclose(np.sort(doubled), np.sort(recorded), atol=1e-8)


weights_and_sizes = st.lists(
    st.tuples(st.floats(1e-3, 1e3), st.integers(1, 50)), min_size=1, max_size=6
)


def test_traces_come_by_weight_and_their_episodes_evenly() -> None:
    draws = draw_mix([3, 1, 6], [4, 1, 10], 20_000, seed=0)
    counts = np.bincount(draws[:, 0], minlength=3)
    assert stats.chisquare(counts, 20_000 * np.array([0.3, 0.1, 0.6])).pvalue > SIGNIFICANCE
    for entry, size in ((0, 4), (2, 10)):
        episodes = np.bincount(draws[:, 1][draws[:, 0] == entry], minlength=size)
        assert len(episodes) == size
        assert stats.chisquare(episodes).pvalue > SIGNIFICANCE
    table = stats.contingency.crosstab(draws[:, 0][:-1], draws[:, 0][1:]).count
    assert stats.chi2_contingency(table).pvalue > SIGNIFICANCE  # no memory


@given(weights_and_sizes, st.integers(0, 60), st.integers(0, 60), st.integers(0, 9))
def test_draws_depend_on_mix_and_seed_alone(
    mix: list[tuple[float, int]], count: int, more: int, seed: int
) -> None:
    weights, sizes = zip(*mix, strict=True)
    draws = draw_mix(weights, sizes, count, seed)
    assert len(draws) == count
    assert ((draws[:, 1] >= 0) & (draws[:, 1] < np.array(sizes)[draws[:, 0]])).all()
    longer = draw_mix([8 * weight for weight in weights], sizes, count + more, seed)
    assert (longer[:count] == draws).all()


def test_other_seeds_draw_others() -> None:
    first, second = (draw_mix([1, 1], [1000, 1000], 100, seed) for seed in (0, 1))
    assert (first[:, 1] != second[:, 1]).mean() > 0.9
