"""Task `tail`: what is written, what is judged, and what later tokens read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim_torch.reference import Verdict, get_task
from arborsim_torch.reference.programs import woven_program

TAIL = get_task("tail")
quick = settings(max_examples=30, deadline=None)
sizes = st.sampled_from([2, 5, 16, 20, 48])


@quick
@given(st.integers(0, 10**6), sizes)
def test_problems_are_reproducible_and_solved_by_their_solution(index, lines):
    problem = TAIL.problem("test", index, lines=lines)
    assert problem == TAIL.problem("test", index, lines=lines)
    assert len(problem.prompt) == 5 * lines + 4
    solution = TAIL.solution(problem)
    assert TAIL.judge(problem, solution) == Verdict(True, True, False, 1.0, 0)
    assert TAIL.steps(problem, solution) == (len(problem.data.needed),) * 2
    for k in range(0, len(solution), 5):
        verdict = TAIL.judge(problem, solution[:k])
        assert not verdict.dead
        assert not verdict.finished
    ends = [k for k in range(len(solution) + 1) if TAIL.is_thought_end(problem, solution[:k])]
    assert len(ends) == lines + 1
    labels = [*(k for k, word in enumerate(TAIL.text(solution).split()) if word[0] == "L")]
    assert ends == [*labels[1:], len(solution)]


def _line_by_line(problem, words):
    """Judge by reading words: (needed lines right, all right and answered)."""
    program = problem.data
    prompt = TAIL.text(problem.prompt).split()
    name = {k: prompt[1 + 5 * k] for k in range(program.lines)}
    right = 0
    for k in program.needed:
        a, b = (f"v{name[j][1:]} {program.values[j]}" if j >= 0 else f"{-1 - j} {-1 - j}"
                for j in program.operands[k])  # fmt: skip
        line = f"{name[k]} {a} {program.ops[k]} M{name[k][1:]} {b} v{name[k][1:]} "
        line += str(program.values[k])
        place = words.index(name[k]) if name[k] in words else len(words)
        right += words[place : place + 9] == line.split()
    answer = f"? v{name[program.query][1:]} {program.values[program.query]}".split()
    at = words.index("?") if "?" in words else len(words)
    return right, right == len(program.needed) and words[at : at + 3] == answer


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_judge_agrees_with_a_reading_of_words(seed):
    rng = np.random.default_rng(seed)
    problem = TAIL.problem("train", seed, lines=int(rng.integers(2, 12)))
    tokens = TAIL.solution(problem)
    for _ in range(int(rng.integers(0, 3))):
        at = int(rng.integers(len(tokens)))
        if rng.random() < 0.5:
            tokens[at] = int(rng.choice(tokens))
        else:
            del tokens[at]
    right, correct = _line_by_line(problem, TAIL.text(tokens).split())
    assert TAIL.steps(problem, tokens) == (right, len(problem.data.needed))
    verdict = TAIL.judge(problem, tokens)
    assert verdict.correct == correct
    if not verdict.correct and verdict.finished:
        assert verdict.dead


def test_mistakes_that_do_not_matter_and_those_that_do():
    problem = next(
        p for p in (TAIL.problem("test", i) for i in range(50))
        if 0 not in p.data.needed and len(TAIL.filler(p.data, 1, TAIL.chain_of(p.data, 1))) > 9
    )  # fmt: skip
    solution = TAIL.solution(problem)
    wrong = list(solution)
    wrong[8] = wrong[8] % 5 + TAIL.vocab["0"]  # the result of a line that nothing needs
    assert TAIL.judge(problem, wrong).correct
    at = solution.index(TAIL.line(problem.data, problem.data.needed[0])[0])
    wrong[at + 1] = TAIL.vocab["ok"]
    assert TAIL.judge(problem, wrong[: at + 2]).dead
    assert not TAIL.judge(problem, wrong[: at + 1]).dead
    skipped = solution[:at] + solution[at + 9 :]
    assert TAIL.judge(problem, skipped).dead
    early = [*solution[:at], *TAIL.answer(problem.data)]
    assert TAIL.judge(problem, early) == Verdict(False, True, True, 0.0, 0)


def _read_later(problem, solution, k):
    """Positions, by a literal reading, that a reasoner at `k` tokens has still to look at."""
    program, words = problem.data, TAIL.text(problem.prompt).split() + TAIL.text(solution).split()
    before = len(problem.prompt)
    now = before + k
    starts = {}
    for place in range(before, len(words)):
        if words[place][0] == "L" and words[place] in words[1 : before - 4 : 5]:
            starts[words[1 : before - 4 : 5].index(words[place])] = place
    done_at = {j: place + 9 for j, place in starts.items()}
    filled_at = {j: starts.get(j + 1, len(words) - 4) for j in starts}  # its filler is over
    wanted = set(range(before - 3, before))
    for j in range(program.lines):
        if done_at[j] > now:  # its prompt line
            wanted |= set(range(1 + 5 * j, 6 + 5 * j))
        readers = [i for i in range(program.lines) if j in program.operands[i]]
        open_reader = j == program.query or any(filled_at[i] > now for i in readers)
        if done_at[j] <= now and open_reader:
            wanted |= {done_at[j] - 2, done_at[j] - 1}
    return wanted


@quick
@given(st.integers(0, 10**4), st.sampled_from([4, 16]), st.floats(0, 0.99))
def test_needed_covers_what_is_read_and_little_else(index, lines, share):
    problem = TAIL.problem("test", index, lines=lines)
    solution = TAIL.solution(problem)
    k = int(share * len(solution))
    needed = TAIL.needed(problem, solution[:k])
    assert needed.shape == (len(problem.prompt) + k,)
    assert TAIL.readers(problem, solution, k) == TAIL.readers(problem, solution)[k:]
    wanted = _read_later(problem, solution, k)
    assert wanted <= set(np.flatnonzero(needed).tolist())
    # Besides, only the last one or two lines, the filler since the last, and the question.
    filler = TAIL.step_tokens - 9
    assert needed.sum() <= len(wanted) + 9 + 9 + filler + 1
    assert not TAIL.needed(problem, solution).any()


def test_most_of_the_reasoning_is_never_read_again():
    shares, filler = [], []
    for index in range(40):
        problem = TAIL.problem("test", index)
        solution = TAIL.solution(problem)
        total = len(problem.prompt) + len(solution)
        counts = [TAIL.needed(problem, solution[:k]).sum() for k in range(0, len(solution), 4)]
        shares.append(max(counts) / total)
        filler.append(1 - 9 * problem.data.lines / len(solution))
    assert np.mean(shares) <= 0.19
    assert max(shares) <= 0.22
    assert np.mean(filler) == pytest.approx(0.77, abs=0.03)


@quick
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_programs_need_the_stated_share(seed, lines):
    program = woven_program(np.random.default_rng(seed), lines)
    assert len(program.needed) == max(1, round(0.75 * lines))
    for k, operands in enumerate(program.operands):
        assert all(-10 <= j < k for j in operands)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="at most 48"):
        TAIL.problem("test", 0, lines=49)
    with pytest.raises(ValueError, match="lines_per_thought"):
        get_task("tail", lines_per_thought=0)
