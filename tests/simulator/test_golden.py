"""Cases worked out by hand on the toy machine (1 byte = 1 us, 128 bytes per token)."""

from __future__ import annotations

import pytest

from arborsim.core.formats import Format
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Moves
from tests.simulator.bench import KV, Bench, moves, profile


def started(prompt: int = 10, **options: object) -> Bench:
    """A prompt of 10 tokens, and leaf 1 about to decode."""
    machine = options.pop("machine", profile())
    bench = Bench(machine, **options)  # type: ignore[arg-type]
    bench.prefill(prompt)
    bench.turn(1)
    return bench


def test_decode_reads_the_weights_and_every_token_once() -> None:
    bench = started()
    bench.decode(2)
    # weights 2000 + 11 tokens, then weights 2000 + 12 tokens
    assert bench.us("decode_s") == pytest.approx(2 * 2000 + (11 + 12) * KV)
    # 10 prompt tokens read the weights once and write their KV
    assert bench.us("prefill_s") == pytest.approx(2000 + 10 * KV)
    assert bench.executor.clock() * 1e6 == pytest.approx(bench.us("total_s"))


def test_full_retention_peaks_at_all_tokens() -> None:
    bench = started(prompt=40)
    bench.decode(60)
    measured = bench.executor.measurements()
    assert measured.peak_hbm_kv_bytes == 100 * KV
    assert measured.peak_hbm_kv_tokens == 100


def test_the_peak_is_transient() -> None:
    bench = started()
    bench.decode(3, moves([0, 1, 2], Tier.EVICTED, step=[0, 1, 2]))
    measured = bench.executor.measurements()
    assert measured.peak_hbm_kv_tokens == 11  # a token is in HBM before the decision after it
    assert bench.executor.ledger.hbm_tokens == 10
    assert measured.evicted_tokens == 3
    assert bench.us("decode_s") == pytest.approx(3 * (2000 + 11 * KV))


def test_stage_copies_down_and_up_behind_decoding_and_saves_no_hbm() -> None:
    bench = started()
    bench.move(range(4), Tier.DDR)
    bench.decode(1)
    bench.executor.finish()
    measured = bench.executor.measurements()
    assert bench.us("decode_s") == pytest.approx(2000 + 11 * KV)
    assert bench.us("exposed_transfer_s") == 0
    assert bench.us("hidden_transfer_s") == pytest.approx(2 * 4 * KV)
    assert (measured.to_ddr_bytes, measured.from_ddr_bytes) == (4 * KV, 4 * KV)
    # 7 tokens in their pages, 4 old copies still there, 4 staged
    assert measured.peak_hbm_kv_bytes == (7 + 4 + 4) * KV
    assert measured.series.hbm_kv_bytes[-1] + measured.series.staging_bytes[-1] == 11 * KV
    assert measured.peak_ddr_bytes == 4 * KV


def test_stage_without_overlap_waits_for_both_directions() -> None:
    bench = started(overlap=False)
    bench.move(range(4), Tier.DDR)
    assert bench.us("exposed_transfer_s") == pytest.approx(2 * 4 * KV)
    assert bench.us("hidden_transfer_s") == pytest.approx(0)


def test_stage_waits_when_the_next_decision_needs_the_link() -> None:
    bench = started()
    bench.move(range(4), Tier.DDR)  # 1024 us of transfers
    bench.move([4], Tier.EVICTED)  # needs no link: no wait
    assert bench.us("exposed_transfer_s") == 0
    bench.move([5], Tier.DDR)
    assert bench.us("exposed_transfer_s") == pytest.approx(2 * 4 * KV)


def test_stage_fetches_each_token_once() -> None:
    bench = started()
    for first in (0, 2, 4):
        bench.move([first, first + 1], Tier.DDR)
        bench.decode(1)
    bench.executor.finish()
    assert bench.executor.measurements().from_ddr_bytes == 6 * KV
    assert bench.executor.measurements().peak_staging_bytes == 6 * KV


def test_stage_promotes_from_its_buffer_without_a_transfer() -> None:
    bench = started()
    bench.move(range(4), Tier.DDR)
    bench.decode(1)
    bench.move(range(4), Tier.HBM)
    bench.executor.finish()
    measured = bench.executor.measurements()
    assert measured.from_ddr_bytes == 4 * KV
    assert measured.series.staging_bytes[-1] == 0


def test_stream_hides_behind_slower_layers() -> None:
    bench = started(recall="stream")
    bench.move(range(4), Tier.DDR)
    bench.decode(1)  # the copy down finishes within this iteration, which reads the old pages
    bench.decode(2)
    measured = bench.executor.measurements()
    assert bench.us("exposed_transfer_s") == 0
    assert measured.from_ddr_bytes == 2 * 4 * KV
    assert bench.us("decode_s") == pytest.approx(3 * 2000 + (11 + 12 + 13) * KV)
    assert bench.us("hidden_transfer_s") == pytest.approx(3 * 4 * KV)
    assert measured.peak_staging_bytes == 4 * KV  # two of two layers


def test_stream_exposes_what_exceeds_the_layers() -> None:
    bench = started(recall="stream", machine=profile(h2d_bytes_per_s=1e5))
    bench.move(range(4), Tier.DDR)
    bench.decode(1)
    bench.decode(1)
    transfer, compute = 10 * 4 * KV / 2, (2000 + 12 * KV) / 2  # per layer
    assert bench.us("exposed_transfer_s") == pytest.approx(2 * (transfer - compute))
    assert bench.us("total_s") - bench.us("prefill_s") == pytest.approx(
        2000 + 11 * KV + 2 * transfer
    )


def test_near_attends_while_the_gpu_works() -> None:
    bench = started(recall="near", machine=profile(ddr_bytes_per_s=1e5))
    bench.move(range(4), Tier.DDR)
    bench.decode(1)
    bench.decode(1)
    queries, partials = 2 * 16 * 2, 2 * (16 * 4 + 4)  # 2 heads of 16; fp32 outputs, one sum each
    layer = 10 * 4 * KV / 2 + queries + partials
    gpu = 8 * KV / 2  # attention to the 8 tokens in HBM
    assert bench.us("exposed_transfer_s") == pytest.approx(2 * (layer - gpu))
    assert bench.us("decode_s") == pytest.approx(2 * 2000 + (11 + 8) * KV)
    measured = bench.executor.measurements()
    assert measured.to_ddr_bytes == 4 * KV + 2 * queries
    assert measured.from_ddr_bytes == 2 * partials
    assert measured.peak_staging_bytes == 0


def test_a_transition_fetches_what_its_path_holds_in_ddr() -> None:
    bench = started(recall="stage")
    bench.decode(5)
    bench.turn(2)
    bench.move(range(10, 15), Tier.DDR)  # off the path: copied down, not fetched back
    bench.decode(1)
    bench.executor.finish()
    assert bench.executor.measurements().from_ddr_bytes == 0
    bench.turn(1)
    assert bench.us("exposed_transfer_s") == pytest.approx(5 * KV)
    assert bench.executor.measurements().peak_staging_bytes == 5 * KV
    bench.turn(2)
    assert bench.executor.measurements().series.staging_bytes[-1] == 0


def test_promotion_of_on_path_tokens_is_waited_for() -> None:
    bench = started(recall="stream")
    bench.move(range(4), Tier.DDR)
    bench.decode(1)
    bench.move(range(4), Tier.HBM)
    assert bench.us("exposed_transfer_s") == pytest.approx(4 * KV)


def test_promotion_of_other_tokens_stays_in_the_background() -> None:
    bench = started(recall="stream")
    bench.decode(5)
    bench.turn(2)
    bench.move(range(10, 15), Tier.DDR)
    bench.decode(1)
    bench.move(range(10, 15), Tier.HBM)
    bench.decode(1)
    assert bench.us("exposed_transfer_s") == 0


def test_rehydration_is_one_prefill_with_the_path_present() -> None:
    bench = started()
    bench.move(range(4), Tier.EVICTED)
    bench.move(range(4), Tier.HBM)
    measured = bench.executor.measurements()
    assert bench.us("rehydration_s") == pytest.approx(2000 + (4 + 6) * KV)
    assert (measured.rehydrations, measured.rehydrated_tokens) == (1, 4)


def test_quantised_tokens_read_fewer_bytes_and_pay_for_widening() -> None:
    bench = started()
    bench.move(range(4), Tier.HBM_QUANTISED)
    assert bench.us("policy_s") == pytest.approx(4 * (KV + 80))  # read whole, written small
    bench.decode(1)
    assert bench.us("decode_s") == pytest.approx(2000 + 7 * KV + 4 * 80 + 4 * 80)
    assert bench.executor.ledger.hbm_bytes == 7 * KV + 4 * 80


@pytest.mark.parametrize(("tree_attention", "prompt_reads"), [(True, 1), (False, 3)])
def test_shared_nodes_are_read_once_or_per_branch(tree_attention: bool, prompt_reads: int) -> None:
    bench = started(tree_attention=tree_attention)
    bench.turn(1, 2, 3)
    bench.decode(1)
    assert bench.us("decode_s") == pytest.approx(2000 + (10 * prompt_reads + 3) * KV)


def test_eager_policies_pay_for_rows_and_matrices() -> None:
    bench = started(fused=False)
    matrices = 2 * 2 * 2 * 10 * 10 * 2  # write + read, layers, heads, n x n, bytes
    assert bench.us("policy_s") == pytest.approx(matrices)
    bench.decode(1)
    assert bench.us("policy_s") == pytest.approx(matrices + 2 * 2 * 2 * 11 * 4)


def test_decisions_cost_time_by_the_tokens_they_look_at() -> None:
    machine = profile(decision_base_s=1e-6, decision_per_token_s=1e-6)
    bench = started(machine=machine)
    # After the 3rd and 4th iteration: paths of 13 and 14.
    bench.decode(4, moves([0, 1, 2], Tier.EVICTED, step=[2, 2, 3]))
    assert bench.us("policy_s") == pytest.approx(2 + 13 + 14)
    bench.move([3], Tier.EVICTED)
    assert bench.us("policy_s") == pytest.approx(2 + 13 + 14 + 1 + 14)
    assert bench.executor.measurements().decisions == 3


def test_hbm_over_time_is_what_each_iteration_holds() -> None:
    bench = started(prompt=10)
    before_s, held = bench.executor.clock(), 0.0
    before = bench.executor.measurements().hbm_byte_seconds
    assert before == pytest.approx(10 * KV * before_s)
    for tokens in (11, 12, 13):
        bench.decode(1)
        now_s = bench.executor.clock()
        held += tokens * KV * (now_s - before_s)
        before_s = now_s
    bench.move(range(6), Tier.EVICTED)
    held += 13 * KV * (bench.executor.clock() - before_s)
    before_s = bench.executor.clock()
    bench.decode(1)
    held += 8 * KV * (bench.executor.clock() - before_s)
    assert bench.executor.measurements().hbm_byte_seconds - before == pytest.approx(held)


def test_the_peak_after_the_first_decision_forgets_what_came_before() -> None:
    bench = started(prompt=10)
    bench.decode(5)
    bench.executor.apply(Moves.none(), 15)  # nothing moves
    assert bench.executor.measurements().peak_after_first_decision_bytes == 15 * KV
    bench.move(range(8), Tier.EVICTED)
    bench.decode(3)
    measured = bench.executor.measurements()
    assert measured.peak_hbm_kv_bytes == 15 * KV
    assert measured.peak_after_first_decision_bytes == 10 * KV
    # The same within a run: after iteration 1 of 6 tokens 0 to 9 go.
    bench = started(prompt=10)
    bench.decode(6, moves(range(10), Tier.EVICTED, step=[1] * 10))
    measured = bench.executor.measurements()
    assert measured.peak_hbm_kv_bytes == 12 * KV
    assert measured.peak_after_first_decision_bytes == 6 * KV
    assert measured.decisions == 1


def test_narrow_formats_cost_their_bytes_and_dequantise_as_many_numbers() -> None:
    formats = (Format(4, 8, scale_bytes=1), Format(2, 8, scale_bytes=1))
    for tier, size in ((Tier.HBM_QUANTISED, 32 + 8), (Tier.HBM_COARSE, 16 + 8)):
        bench = started(prompt=10, formats=formats)
        bench.move(range(10), tier)
        assert bench.executor.ledger.hbm_bytes == 10 * size
        assert bench.us("policy_s") == pytest.approx(10 * (KV + size))
        bench.decode(1)
        # 80 bytes a token in 8 bits are what is dequantised
        assert bench.us("decode_s") == pytest.approx(2000 + KV + 10 * size + 10 * 80)


def test_a_page_is_freed_with_its_last_token() -> None:
    bench = started(prompt=8, page_tokens=4)
    bench.move([0, 1, 2], Tier.EVICTED)
    assert bench.executor.ledger.hbm_page_bytes == 8 * KV
    bench.move([3], Tier.EVICTED)
    assert bench.executor.ledger.hbm_page_bytes == 4 * KV
    bench.decode(1)
    assert bench.executor.measurements().peak_hbm_kv_bytes == 8 * KV


def test_what_does_not_fit_is_reported_not_refused() -> None:
    bench = started(prompt=10, machine=profile(hbm_bytes=4000))
    measured = bench.executor.measurements()
    assert not measured.fits
    assert measured.needed_hbm_bytes == 2000 + 10 * KV + measured.workspace_bytes
    assert started().executor.measurements().fits


def test_a_branch_that_has_ended_is_no_longer_read() -> None:
    bench = started()
    bench.turn(1, 2)
    bench.decode(4)  # the prompt, and 2 tokens more every time
    bench.leaves = (2,)
    bench.decode(1)  # the prompt and 5 tokens of leaf 2
    reads = 4 * 10 + (2 + 4 + 6 + 8) + 15
    assert bench.us("decode_s") == pytest.approx(5 * 2000 + reads * KV)


def test_a_branch_that_pauses_keeps_its_staging_buffers() -> None:
    bench = started()
    bench.turn(1, 2)
    bench.decode(4)
    bench.move([10, 12], Tier.DDR)  # of leaf 1
    bench.executor.finish()
    bench.leaves = (2,)
    bench.decode(1)
    assert bench.executor.measurements().series.staging_bytes[-1] == 2 * KV
    bench.leaves = (1, 2)
    bench.decode(1)
    bench.turn(2)
    measured = bench.executor.measurements()
    assert measured.from_ddr_bytes == 2 * KV
    assert measured.series.staging_bytes[-1] == 0
