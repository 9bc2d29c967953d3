"""Task `tail`: long reasoning of which most is never read again.

The problems are those of `chain`: a program modulo 10 and the question for one of its results.
Every line is evaluated, in order, and most of what is written between the lines is filler::

    L8 v7 8 - M8 2 2 v8 6            a program line, as in chain
    say6 U8 w4 w47 w12 ...           a remark: words that its opener determines
    again2 U8 v7 8 - 2 2 v8 6 ok     the line that was just written, once more
    try5 U8 6 + 3 v72 9 - 4 v88 5 no a dead end with two variables that are never read
    L24 ? v22 4 <eos>                the answer

45 openers form 16 fixed chains of one to five blocks, and a line's label tells which chain
follows it, so greedy decoding is defined.  About 77% of the reasoning is filler, and three quarters
of the lines are needed for the answer.  What later tokens read is known exactly (`needed`), so the
task shows what a cache policy could keep at best.  Only needed lines and the answer are judged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .chain import ANSWER_TOKENS, LINE_TOKENS, PROMPT_LINE_TOKENS, ChainTask
from .programs import MODULUS, NAMES, Program, woven_program
from .tasks import SPLIT_SEEDS, Problem, Readers, Verdict, Vocabulary

MAX_LINES = 48  #: so that the dead ends' variables are no program's
WORDS = 60  #: of remarks
_TASK_SEED = 0x7461696C
_CHAINS_SEED = 0x66696C6C
CHAINS, OPENERS = 16, 45
DEAD_ENDS = (64, 80)  #: how far from the line's name the names of a dead end lie
_STEPS = 64  #: of a line: its own, and one for each block after it


def _draw_fillers() -> tuple[list[list[str]], dict[str, list[int]], list[int]]:
    """Return the chains of openers, what each opener determines, and the chain of each label."""
    rng = np.random.default_rng(_CHAINS_SEED)
    sizes = np.ones(CHAINS, dtype=int)
    while sizes.sum() < OPENERS:  # one to five blocks
        sizes[rng.choice(np.flatnonzero(sizes < 5))] += 1
    kinds = [("say", "again", "try")[i] for i in rng.integers(0, 3, OPENERS)]
    openers = [f"{kind}{i}" for i, kind in enumerate(kinds)]
    details = {
        opener: rng.integers(0, WORDS, rng.integers(5, 13)).tolist()
        if opener.startswith("say")
        else [*rng.integers(0, 2, 2).tolist(), *rng.integers(0, MODULUS, 2).tolist()]
        for opener in openers
    }
    ends = np.cumsum(sizes)
    chains = [openers[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return chains, details, rng.integers(0, CHAINS, NAMES).tolist()


_CHAINS, _DETAILS, _CHAIN_OF_LABEL = _draw_fillers()


class TailTask(ChainTask):
    """Evaluate a program of at most 48 lines line by line, with filler in between, and answer.

    `lines_per_thought` lines, each with its filler, make up one thought of a search.
    """

    name = "tail"

    def __init__(self, lines: int = 16, lines_per_thought: int = 1) -> None:
        super().__init__(lines, lines_per_thought)
        words = [*_DETAILS, *(f"w{i}" for i in range(WORDS)), "ok", "no"]
        self.vocab = Vocabulary([*self.vocab.vocab, *words])
        self.vocab_size = len(self.vocab)
        self._openers = {self.vocab[opener]: opener for opener in _DETAILS}
        self._next_opener = {
            self.vocab[a]: self.vocab[b] if b else None
            for chain in _CHAINS
            for a, b in zip(chain, [*chain[1:], ""], strict=True)
        }
        longest = max(sum(self._block_tokens(o) for o in chain) for chain in _CHAINS)
        self.step_tokens = lines_per_thought * (LINE_TOKENS + longest)

    @property
    def max_tokens(self) -> int:
        """Tokens that no sensible reasoning exceeds: each line with the longest filler."""
        return self.lines * (self.step_tokens // self.lines_per_thought) + ANSWER_TOKENS + 2

    def problem(self, split: str, index: int, *, lines: int | None = None) -> Problem:
        count = self.lines if lines is None else lines
        if count > MAX_LINES:
            raise ValueError(f"lines must be at most {MAX_LINES}, not {count}")
        rng = np.random.default_rng([_TASK_SEED, SPLIT_SEEDS[split], count, index])
        program = woven_program(rng, count)
        return Problem(self.name, split, index, tuple(self.prompt(program)), program)

    # ------------------------------------------------------------------ writing

    def chain_of(self, program: Program, k: int) -> int:
        """Return the chain of blocks that follows program line `k` in the reference."""
        return _CHAIN_OF_LABEL[(program.offset + k) % NAMES]

    def filler(self, program: Program, k: int, chain: int) -> list[int]:
        """Return the ids of the blocks of `chain`, written after program line `k`."""
        return [t for opener in _CHAINS[chain] for t in self._block(program, k, opener)]

    def _block(self, program: Program, k: int, opener: str) -> list[int]:
        n = (program.offset + k) % NAMES
        head = [self.vocab[opener], self._names["U"][n]]
        if opener.startswith("say"):
            return head + [self.vocab[f"w{i}"] for i in _DETAILS[opener]]
        if opener.startswith("again"):
            line = self.line(program, k)
            return [*head, *line[1:4], *line[5:], self.vocab["ok"]]
        value = program.values[k]
        ids = [*head, self._digits[value]]
        for sign, digit, far in zip(*np.reshape(_DETAILS[opener], (2, 2)), DEAD_ENDS, strict=True):
            value = int(value + digit if sign else value - digit) % MODULUS
            ids += [self._ops["+" if sign else "-"], self._digits[digit]]
            ids += [self._names["v"][(n + far) % NAMES], self._digits[value]]
        return [*ids, self.vocab["no"]]

    @staticmethod
    def _block_tokens(opener: str) -> int:
        if opener.startswith("say"):
            return 2 + len(_DETAILS[opener])
        return 10 if opener.startswith("again") else 12

    def ending(self, program: Program) -> list[int]:
        """Return the ids after the last line: the label that names no line, and the answer."""
        end = (program.offset + program.lines) % NAMES
        return [self._names["L"][end], *self.answer(program)]

    def solution(self, problem: Problem) -> list[int]:
        """Return the reference reasoning: every line with its filler, then the answer."""
        program = problem.data
        ids: list[int] = []
        for k in range(program.lines):
            ids += self.line(program, k) + self.filler(program, k, self.chain_of(program, k))
        return ids + self.ending(program)

    # ------------------------------------------------------------------ judging

    def is_thought_end(
        self, problem: Problem, generated: Sequence[int], block_tokens: int = 0
    ) -> bool:
        """Tell whether the last token closes the filler of a thought's last line, or everything."""
        if not generated:
            return False
        if self.is_finished(problem, generated):
            return True
        starts = self._line_starts(problem.data, generated)
        if len(starts) % self.lines_per_thought or not starts:
            return False
        begin, opener = self._last_block(generated)
        return (
            opener is not None
            and self._next_opener[opener] is None
            and len(generated) - begin == self._block_tokens(self._openers[opener])
        )

    def _last_block(self, generated: Sequence[int]) -> tuple[int, int | None]:
        """Return where the last block begins and its opener's id; None for a program line."""
        for i in range(len(generated) - 1, -1, -1):
            if generated[i] in self._openers:
                return i, generated[i]
            if generated[i] in self._label_number:
                return i, None
        return 0, None

    def _line_starts(self, program: Program, generated: Sequence[int]) -> dict[int, int]:
        """Return, by program line, where in `generated` its evaluation begins (the first)."""
        starts: dict[int, int] = {}
        for i, token in enumerate(generated):
            if token in self._label_number:
                k = self._choice(program, token)
                if 0 <= k < program.lines:
                    starts.setdefault(k, i)
        return starts

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int]:
        """Return (needed lines that `generated` holds without a mistake, needed lines).

        A line counts by its first evaluation.
        """
        program = problem.data
        starts = self._line_starts(program, generated)
        right = sum(
            list(generated[starts[k] : starts[k] + LINE_TOKENS]) == self.line(program, k)
            for k in program.needed
            if k in starts
        )
        return right, len(program.needed)

    def judge(self, problem: Problem, generated: Sequence[int]) -> Verdict:
        """Verify needed lines and the answer; filler and lines that are not needed may be wrong.

        A path is dead from the first wrong token of a needed line, from a label past a needed
        line that was not evaluated, and from a premature or wrong answer.
        """
        program = problem.data
        finish = self._finish(generated)
        tokens = list(generated[:finish])
        starts = self._line_starts(program, tokens)
        right, last = 0, max(starts, default=-1)
        dead = False
        for k in program.needed:
            line = tokens[starts[k] : starts[k] + LINE_TOKENS] if k in starts else []
            dead = dead or line != self.line(program, k)[: len(line)] or (not line and k < last)
            right += len(line) == LINE_TOKENS and not dead
        progress = right / len(program.needed)
        if finish is not None:
            answered = tokens[-ANSWER_TOKENS:] == self.answer(program)
            correct = answered and not dead and progress == 1.0
            return Verdict(correct, True, not correct, progress, 0)
        asked = tokens.index(self._ask) if self._ask in tokens else len(tokens)
        part = tokens[asked:]
        dead = dead or (bool(part) and (progress < 1 or part != self.answer(program)[: len(part)]))
        return Verdict(False, False, dead, progress, 0 if dead else self._left(program, tokens))

    def _left(self, program: Program, tokens: Sequence[int]) -> int:
        """Return the tokens of the shortest completion: the lines left, without filler."""
        starts = self._line_starts(program, tokens)
        if self._ask in tokens:
            return ANSWER_TOKENS - (len(tokens) - list(tokens).index(self._ask))
        last = max(starts, default=-1)
        within = LINE_TOKENS - (len(tokens) - starts[last]) if last >= 0 else 0
        todo = sum(k > last for k in program.needed)
        return max(0, within) + todo * LINE_TOKENS + ANSWER_TOKENS

    def readers(self, problem: Problem, generated: Sequence[int], start: int = 0) -> list[Readers]:
        """Return who reads each token (`Task.readers`); a line and each block after it are steps.

        A prompt line is read until its line is evaluated, and the question to the end.  A result
        (`v_n z`) is read by the lines that have it as an operand and by their filler, which may
        repeat them, or by the answer.  A line is read until the next one is complete, a block until
        the next line begins.
        """
        program = problem.data
        before, end = len(problem.prompt), _STEPS * program.lines
        rows: list[Readers] = [
            (0, min(_STEPS * (max(0, at - 1) // PROMPT_LINE_TOKENS), end))
            for at in range(start, before)
        ]
        first = max(0, start - before)
        last = min(first, len(generated) - 1)
        begin = next((i for i in range(last, -1, -1) if generated[i] in self._label_number), 0)
        line, block, ahead = -1, 0, begin
        for at in range(begin, len(generated)):
            token = generated[at]
            if token in self._label_number:
                line, block, ahead = self._choice(program, token), 0, at
            elif token in self._openers:
                block = min(block + 1, _STEPS - 1)
            inside = at - ahead
            now = max(0, min(_STEPS * line + block, end))
            after, steps, filled = now, {now}, _STEPS * (line + 1) - 1
            if block:
                steps.add(filled)
            elif 0 <= line < program.lines and inside < LINE_TOKENS:
                steps.add(filled + 1)
                if inside >= LINE_TOKENS - 2:
                    own = self._readers_of(program)[line]
                    steps |= {_STEPS * each for each in own}
                    steps |= {_STEPS * each + _STEPS - 1 for each in own if each < program.lines}
                after += inside == LINE_TOKENS - 1
            after += line >= program.lines and inside == ANSWER_TOKENS
            if at >= first:
                rows.append((after, *sorted(steps)))
        return rows
