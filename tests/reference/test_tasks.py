"""Tokenisers, generators, splits and verifiers of the reference tasks."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import slow_verifiers
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim_torch.reference import Verdict, get_task, noisy_value
from arborsim_torch.reference.game24 import moves, remainder, solvable, splits
from arborsim_torch.reference.programs import random_program
from arborsim_torch.reference.tasks import ValueReadout, Vocabulary
from benchmarks.reference.curriculum import KINDS, RECIPES, make_pool

CHAIN = get_task("chain", lines=20, lines_per_thought=3)
GAME = get_task("game24")
quick = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("task", [CHAIN, GAME, get_task("tail")], ids=["chain", "game24", "tail"])
def test_tokeniser_round_trip(task, tmp_path):
    ids = list(range(task.vocab_size))
    assert task.vocab.encode(task.text(ids).split()) == ids
    task.vocab.save(tmp_path / "vocab.json")
    assert Vocabulary.load(tmp_path / "vocab.json").vocab == task.vocab.vocab
    assert task.text([task.eos_id]) == "<eos>"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown task"):
        get_task("sudoku")
    with pytest.raises(KeyError):
        CHAIN.problem("validation", 0)
    with pytest.raises(ValueError, match="lines"):
        CHAIN.problem("test", 0, lines=126)


def test_light_import():
    code = (
        "import sys, arborsim_torch.reference as r; r.get_task('chain').problem('test', 0);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@quick
@given(st.integers(0, 10**6), st.sampled_from([4, 20, 64, 125]))
def test_chain_problems_are_reproducible_and_solved_by_their_solution(index, lines):
    problem = CHAIN.problem("test", index, lines=lines)
    assert problem == CHAIN.problem("test", index, lines=lines)
    assert len(problem.prompt) == 5 * lines + 4
    solution = CHAIN.solution(problem)
    for k in range(len(solution)):
        verdict = CHAIN.judge(problem, solution[:k])
        assert not (verdict.dead)
        assert not (verdict.finished)
        assert verdict.remaining_tokens == len(solution) - k
    assert CHAIN.judge(problem, solution) == Verdict(True, True, False, 1.0, 0)


def _random_trace(rng, program):
    chosen = set()
    for k in range(program.query + 1):
        ready = all(j < 0 or j in chosen for j in program.operands[k])
        if k in program.needed or (ready and rng.random() < 0.5):
            chosen.add(k)
    return CHAIN.reasoning(program, sorted(chosen))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_chain_verifier_agrees_with_the_slow_one(seed):
    rng = np.random.default_rng(seed)
    problem = CHAIN.problem("train", seed, lines=int(rng.integers(2, 24)))
    tokens = _random_trace(rng, problem.data)
    mutation = rng.integers(5)
    at = int(rng.integers(len(tokens)))
    if mutation == 1:  # another word of the trace or any word
        tokens[at] = int(rng.choice([rng.choice(tokens), rng.integers(CHAIN.vocab_size)]))
    elif mutation == 2:  # a line is left out
        del tokens[at - at % 9 : at - at % 9 + 9]
    elif mutation == 3:
        tokens = tokens[:at]
    elif mutation == 4:
        tokens.insert(at, CHAIN.eos_id)
    verdict = CHAIN.judge(problem, tokens)
    expected = slow_verifiers.chain(CHAIN.text(problem.prompt), CHAIN.text(tokens))
    assert (verdict.correct, verdict.finished, verdict.dead) == expected
    assert 0 <= verdict.progress <= 1
    assert (verdict.remaining_tokens == 0) == (verdict.dead or verdict.finished)
    assert CHAIN.is_finished(problem, tokens) == verdict.finished


def _chain_positions_read(problem, words, at):
    """Positions that the tokens from `at` on look up, by the words of prompt and reasoning."""
    start, end = len(problem.prompt), len(problem.prompt) - 3
    line_of = {words[i]: range(i, i + 5) for i in range(1, end, 5)}
    result_of = {words[i]: (i, i + 1) for i in range(start + 7, len(words), 9)}
    found = set(range(end, start))  # the question
    for i in range(start, len(words), 9):
        part = words[i : i + 9]
        if i + len(part) <= at or part[0] == "?":
            continue
        found |= set(line_of[part[0]])
        for operand in (part[1], part[5]):
            found |= set(result_of.get(operand, ()))
        found |= {p for p in range(i, i + 9) if p < at}  # what it has written of itself
    if words[-3] == "?":
        found |= set(result_of[words[-2]])
    return {p for p in found if p < at}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_chain_needs_what_the_rest_reads_and_no_result_after_its_last_reader(seed):
    rng = np.random.default_rng(seed)
    problem = CHAIN.problem("train", seed, lines=int(rng.integers(2, 24)))
    program, tokens = problem.data, _random_trace(rng, problem.data)
    words = CHAIN.text([*problem.prompt, *tokens]).split()
    before = np.ones(0, dtype=bool)
    for i in range(len(tokens)):
        needed = CHAIN.needed(problem, tokens[:i])
        at = len(problem.prompt) + i
        assert needed.shape == (at,)
        assert _chain_positions_read(problem, words, at) <= set(np.flatnonzero(needed).tolist())
        assert not (needed[: len(before)] & ~before).any()  # what is done with stays so
        before = needed
    assert CHAIN.readers(problem, tokens, 11) == CHAIN.readers(problem, tokens)[11:]
    before = CHAIN.needed(problem, tokens[:-3])  # before the answer
    evaluated = [int(words[p][1:]) for p in range(len(problem.prompt), len(words) - 3, 9)]
    lines = [(n - program.offset) % 128 for n in evaluated]
    for k, position in zip(lines, range(len(problem.prompt) + 7, len(words), 9), strict=False):
        later = [j for j in range(lines[-1] + 1, program.lines) if k in program.operands[j]]
        assert before[position] == (k == program.query or bool(later))


@quick
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_steps_count_needed_lines_that_are_right(seed, broken):
    problem = CHAIN.problem("train", seed, lines=12)
    solution = CHAIN.solution(problem)
    count = len(problem.data.needed)
    assert CHAIN.steps(problem, solution) == (count, count)
    assert CHAIN.steps(problem, solution[: 9 * (count - 1)]) == (count - 1, count)
    wrong = list(solution)
    wrong[broken % (9 * count)] = CHAIN.vocab.bos_id
    assert CHAIN.steps(problem, wrong) == (count - 1, count)
    index = seed % 269
    game = GAME.problem("test", index)
    moves_made = GAME.solution(game)
    for lines, end in enumerate((0, 11, 21, 30)):
        assert GAME.steps(game, moves_made[:end]) == (lines, 3)


def test_game24_needs_the_numbers_that_are_left():
    problem = GAME.problem("test", 3)
    solution = GAME.solution(problem)
    for written, first, last in ((0, 1, 7), (11, 12, 17), (21, 23, 27)):
        needed = GAME.needed(problem, solution[:written])
        brackets = set(range(first, last))
        assert brackets <= set(np.flatnonzero(needed).tolist())
        assert needed[:7].all() == (written == 0)
    assert GAME.readers(problem, solution, 9) == GAME.readers(problem, solution)[9:]


def test_chain_thoughts_are_blocks_of_lines():
    problem = CHAIN.problem("test", 5)
    tokens = CHAIN.reasoning(problem.data, range(problem.data.query + 1))
    ends = [k for k in range(len(tokens) + 1) if CHAIN.is_thought_end(problem, tokens[:k])]
    assert ends[:-1] == [k for k in range(27, len(tokens), 27) if k < len(tokens)]
    assert ends[-1] == len(tokens)
    assert CHAIN.is_finished(problem, tokens)
    assert not CHAIN.is_finished(problem, tokens[:-1])


def test_chain_operands_come_from_the_stated_distribution():
    rng = np.random.default_rng(0)
    programs = [random_program(rng, 100) for _ in range(100)]
    operands = np.array([p.operands for p in programs])[:, 50:]
    distance = np.arange(50, 100)[None, :, None] - operands
    constant = operands < 0
    assert constant.mean() == pytest.approx(0.1, abs=0.01)
    near = ((distance <= 8) & ~constant).mean()
    assert near == pytest.approx(0.2 + 0.7 * np.mean(8 / np.arange(50, 100)), abs=0.02)


def test_splits_of_game24_are_disjoint_and_complete():
    parts = splits()
    train, test = set(parts["train"]), set(parts["test"])
    assert (len(train), len(test)) == (1077, 269) == tuple(map(GAME.num_problems, parts))[::-1]
    assert not train & test
    assert all(slow_verifiers.reaches_24(hand) for hand in list(train)[:50])


def test_training_never_sees_a_test_puzzle():
    stage = dataclasses.replace(RECIPES["game24"].stages[0], tokens=4000)
    test = {tuple(GAME.prompt(hand)) for hand in splits()["test"]}
    for pool in range(3):
        for batch in make_pool(GAME, stage, (0, 0, pool)):
            assert not test & {tuple(row[:7].tolist()) for row in batch.ids}


@pytest.mark.parametrize("lines", [5, 96])
def test_chain_splits_are_disjoint(lines):
    prompts = {
        split: {CHAIN.problem(split, i, lines=lines).prompt for i in range(200)}
        for split in ("train", "test")
    }
    assert not prompts["train"] & prompts["test"]


@quick
@given(st.lists(st.integers(0, 30), min_size=2, max_size=4))
def test_solvability_agrees_with_the_slow_solver(numbers):
    assert solvable(numbers) == slow_verifiers.reaches_24(tuple(sorted(numbers)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 268), st.integers(0, 10**6))
def test_game24_verifier_agrees_with_the_slow_one(index, seed):
    rng = np.random.default_rng(seed)
    problem = GAME.problem("test", index)
    numbers, tokens = problem.data.numbers, []
    for _ in range(int(rng.integers(4))):
        options = [
            m for m in moves(numbers) if rng.random() < 0.2 or solvable(remainder(numbers, m))
        ]
        if not options:
            break
        move = options[rng.integers(len(options))]
        tokens += GAME.line(numbers, move)
        numbers = remainder(numbers, move)
    if tokens and rng.random() < 0.5:
        # Not the value token: whatever it is, it harms nothing.
        at = int(rng.integers(len(tokens)))
        if at + 1 not in (11, 21, 30):
            tokens[at] = int(rng.integers(3, GAME.vocab_size))
    verdict = GAME.judge(problem, tokens)
    expected = slow_verifiers.game24(GAME.text(problem.prompt), GAME.text(tokens))
    assert (verdict.correct, verdict.dead) == (expected[0], expected[2])
    assert verdict.finished == (len(tokens) == 30)


def test_game24_solution_and_cost_to_go():
    problem = GAME.problem("test", 7)
    solution = GAME.solution(problem)
    for k in range(30):
        verdict = GAME.judge(problem, solution[:k])
        assert not verdict.dead
        assert verdict.remaining_tokens == 30 - k
        assert GAME.is_value_next(problem, solution[:k]) == (k in (10, 20, 29))
        assert GAME.is_thought_end(problem, solution[:k]) == (k in (11, 21))
    assert GAME.judge(problem, solution).correct
    assert GAME.judge(problem, [*solution[:11], GAME.eos_id]).dead


def test_value_readout_is_a_probability():
    readout = ValueReadout(yes_id=1, no_id=0)
    assert readout.probability(np.array([[0.0, np.log(3.0)]])) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="noisy_value"):
        CHAIN.value_from_model(np.zeros(CHAIN.vocab_size))


def test_noisy_value():
    rng = np.random.default_rng(0)
    alive, dead = Verdict(False, False, False, 0.5, 9), Verdict(False, False, True, 0.5, 0)
    assert noisy_value(alive, rng, 0.0) == 0.5
    assert noisy_value(dead, rng, 0.0) == 0.0
    assert noisy_value(dead, rng, 0.0, dead_penalty=0.0) == 0.5
    draws = [noisy_value(alive, rng, 0.1) for _ in range(2000)]
    assert np.std(draws) == pytest.approx(0.1, abs=0.01)
    with pytest.raises(ValueError, match="noise"):
        noisy_value(alive, rng, -1.0)


@pytest.mark.parametrize("name", ["chain", "game24", "tail", "tail-deep"])
@pytest.mark.parametrize("place", [0, -1])
def test_training_batches(name, place):
    """Reproducible, within the budget, hardly padded, and true to the verifier."""
    task, stage = get_task(RECIPES[name].task), RECIPES[name].stages[place]
    pool = make_pool(task, stage, (1, 0, 0))
    again = make_pool(task, stage, (1, 0, 0))
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(pool, again, strict=True))
    assert all(batch.ids.size <= stage.tokens for batch in pool)
    total = sum(batch.ids.size for batch in pool)
    padding = sum((batch.ids == task.pad_id).sum() for batch in pool)
    assert padding < 0.1 * total
    trained = {KINDS[k] for batch in pool for k in np.unique(batch.kinds)}
    assert {"context", "determined"} <= trained
    assert ("filler" in trained) == (task.name == "tail" and stage.filler > 0)
    assert ("choice" in trained) == (task.name != "tail" or stage.filler > 0)
