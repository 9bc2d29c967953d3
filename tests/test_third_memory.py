"""Tiers are data: a memory that a profile lists, used by a policy from outside the package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.core.measurements import Stored
from arborsim.core.tiers import Budget, Tier
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.machine.scheduler import Timed
from arborsim.machine.serving import ServingEngine
from arborsim.play.backends import LiveRequest
from arborsim.play.episode import Cell
from arborsim.products.plan import tables
from arborsim.products.plan.plan import Planner
from tests.helpers import cold_on_nvme
from tests.helpers.cold_on_nvme import ColdOnNvme
from tests.helpers.demands import record_demands
from tests.plan.make import small_workload
from tests.serving.literal import play_event_by_event
from tests.serving.test_equivalence import assert_same

TRACE = Path("traces/game24-tot.parquet")
READ, WRITE, LATENCY = 7e9, 5e9, 80e-6
PROFILE = f"""
base = "rtx4090"
name = "with-nvme"
block_bytes = [1.0]
block_efficiency = [1.0]  # PCIe never is the slower link

[[memories]]
name = "NVMe"
bytes = 2e12
read_bytes_per_s = {READ}
write_bytes_per_s = {WRITE}
latency_s = {LATENCY}
sources = {{read_bytes_per_s = "the drive's datasheet, read 2026-11"}}
"""
POLICY = "tests.helpers.cold_on_nvme:ColdOnNvme"


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    path = tmp_path / "with-nvme.toml"
    path.write_text(PROFILE)
    return path


def replayed(gpu: object, out: Path, *more: str) -> str:
    return (
        f"replay {TRACE} --policy {POLICY} --episodes 2 --budget 0.5 --gpu {gpu} "
        f"--model llama-3.1-8b --out {out} {' '.join(more)}"
    )


def test_the_policy_is_short() -> None:
    code = Path(cold_on_nvme.__file__).read_text().splitlines()
    assert sum(bool(line.strip()) for line in code) < 40


def test_a_replay_has_columns_of_its_own(
    gpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main([*replayed(gpu, out).split(), "--view", "table"]) == 0
    assert "NVMe" in capsys.readouterr().out
    told = json.loads(out.read_text())
    rows = {row["policy"]: row["stored"]["NVMe"] for row in told["rows"]}
    assert rows["full"] == {**dict.fromkeys(rows["full"], 0), "usable_bytes": 2 * 10**12}
    searches = [each for each in told["episodes"] if each["policy"] == "cold-on-nvme"]
    assert [each["peak_ddr_bytes"] for each in searches] == [0, 0]
    assert rows["cold-on-nvme"]["peak_bytes"] == max(each["nvme_peak_bytes"] for each in searches)
    for each in searches:
        token_bytes = load_geometry("llama-3.1-8b").kv_bytes_per_token
        assert each["nvme_to_bytes"] == each["offloaded_tokens"] * token_bytes
        # Every transfer waits for the drive and goes at its speed.
        moved_s = each["nvme_to_bytes"] / WRITE + each["nvme_from_bytes"] / READ
        transfers = (each["nvme_link_s"] - moved_s) / LATENCY
        assert transfers == pytest.approx(round(transfers), abs=1e-6)
        assert transfers >= 1


def test_results_in_a_file_know_it(gpu: Path, tmp_path: Path) -> None:
    import arborsim

    out = tmp_path / "out.parquet"
    assert main(replayed(gpu, out).split()) == 0
    stored = {
        episode.policy: episode.measured.stored
        for episode in arborsim.load_results(out).raw.episodes
    }
    assert isinstance(stored["cold-on-nvme"]["NVMe"], Stored)
    assert stored["cold-on-nvme"]["NVMe"].peak_bytes > stored["full"]["NVMe"].peak_bytes == 0


def test_a_plan_has_its_space_and_its_link(gpu: Path) -> None:
    workload = small_workload(
        ('gpus = ["rtx4090", "h100"]', f'gpus = ["{gpu}"]'),
        ('policies = ["full", "streaming-llm"]', f'policies = ["full", "{POLICY}"]'),
        ("searches = 40\nwarm_up = 8\nruns = 2", "searches = 16\nwarm_up = 4\nruns = 1"),
    )
    result = Planner(workload).run()
    (full,) = [each for each in result.candidates if each.policy == "full"]
    (cold,) = [each for each in result.candidates if each.policy == "cold-on-nvme"]
    assert full.alone is not None
    assert full.alone.peak_stored_bytes == {"NVMe": 0}
    assert cold.alone is not None
    assert cold.alone.peak_stored_bytes["NVMe"] > 0
    assert cold.alone.peak_ddr_bytes == 0
    assert cold.alone.terms_s["transfers to NVMe"] > 0
    assert cold.at_largest is not None
    assert 0 < cold.at_largest.used.below["NVMe"] < cold.at_largest.used.links["NVMe"] < 1
    assert "alone_peak_stored_bytes_NVMe" in tables.candidates(result)


def test_searches_wait_for_the_link_of_the_drive(gpu: Path) -> None:
    """Its oracle plays every transfer as a process; PCIe is idle."""
    profile, geometry = load_profile(str(gpu)), load_geometry("llama-3.1-8b")
    slow = replace(profile.memories[0], read_bytes_per_s=READ / 50, write_bytes_per_s=WRITE / 50)
    profile = replace(profile, memories=(slow,))
    demands = list(
        record_demands(
            TRACE, ColdOnNvme(), Budget.parse("0.5"), Machine(profile, geometry), count=2
        )
    )
    engine = ServingEngine(demands, profile, geometry)
    at_once = Timed(((0.0, 0), (0.0, 0), (0.0, 1), (0.001, 1)))
    together = engine.run(at_once)
    assert_same(together, engine.run(at_once, play_event_by_event), memories={"NVMe"})
    assert together.to_host_bytes == together.from_host_bytes == 0
    assert together.used.links["NVMe"] > max(
        engine.run(Timed(((0.0, n),))).used.links["NVMe"] for n in (0, 1)
    )


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("rtx4090", "", "places tokens on NVMe; rtx4090 has HBM and DDR"),
        ("", "--recall stream", "recall stream reads them in DDR only: use recall stage"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    name: str, more: str, why: str, gpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{replayed(name or gpu, tmp_path / 'out.json')} {more}".split()
    assert main(command) == 0  # full retention runs
    out = " ".join(capsys.readouterr().out.split())
    assert why in out


def test_live_runs_refuse_it() -> None:
    cells = (Cell(ColdOnNvme(), Budget.parse("0.5")),)
    expected = "cold-on-nvme places tokens on NVMe; the live backend has HBM and DDR"
    with pytest.raises(UsageError, match=expected):
        LiveRequest(model="arborsim-chain", cells=cells)


def test_a_plan_into_a_tier_that_no_method_names(gpu: Path, tmp_path: Path) -> None:
    from arborsim.core.errors import PlanError
    from arborsim.memory.ledger import Ledger
    from tests.simulator.bench import moves

    with pytest.raises(PlanError, match="NVME: name that among the policy's tiers"):
        Ledger(1, 64, (40,)).resolve(moves([0], Tier.NVME), arriving=1)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('name = "NVMe"', 'name = "DDR"', "HBM and DDR have keys of their own"),
        ("bytes = 2e12", "bytes = 0", r"\[\[memories\]\] 1 bytes must be above 0"),
        ("latency_s = 8e-05", "latency = 1", "latency_s"),
        ("latency_s", "block_bytes = [2, 1]\nlatency_s", "block_bytes must rise"),
    ],
)
def test_a_list_that_means_nothing(old: str, new: str, why: str, gpu: Path) -> None:
    assert old in PROFILE
    gpu.write_text(PROFILE.replace(old, new, 1))
    with pytest.raises(UsageError, match=why):
        load_profile(str(gpu))


def test_its_numbers_name_their_sources(gpu: Path) -> None:
    assumed = load_profile(str(gpu)).assumed()
    assert "NVMe.write_bytes_per_s" in assumed
    assert "NVMe.read_bytes_per_s" not in assumed
