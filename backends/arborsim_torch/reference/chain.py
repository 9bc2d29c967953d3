"""Task `chain`: long reasoning in which early results are needed late.

A problem is a straight-line program modulo 10 and the question for one of its
results.  The prompt lists the program, five tokens a line, then the question::

    <bos> L7 3 + M7 5   L8 U7 - M8 2   ...   L103 ? U95

Each reasoning line evaluates one program line, in program order; lines may be
skipped, but a line's operands must have been evaluated before it::

    L7 3 3 + M7 5 5 v7 8   L8 v7 8 - M8 2 2 v8 6   ...   ? v95 4 <eos>

So the label at the head of a line is a real decision, and everything else is determined: the
program line by its label, operand values by earlier results.  Names are numbered from a random
offset modulo 128, so that absolute positions cannot stand in for look-ups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from .programs import MODULUS, NAMES, Program, random_program
from .tasks import BOS, EOS, PAD, SPLIT_SEEDS, Problem, Readers, Task, Verdict, Vocabulary

LINE_TOKENS = 9
PROMPT_LINE_TOKENS = 5
ANSWER_TOKENS = 3
_TASK_SEED = 0x636861696E


class ChainTask(Task):
    """Evaluate what is needed of a random program of `lines` lines, and answer.

    `lines_per_thought` reasoning lines make up one thought of a search.
    """

    name = "chain"

    def __init__(self, lines: int = 96, lines_per_thought: int = 4) -> None:
        if lines_per_thought < 1:
            raise ValueError("lines_per_thought must be at least 1")
        names = [f"{kind}{n}" for kind in "LvUM" for n in range(NAMES)]
        digits = map(str, range(MODULUS))
        super().__init__(Vocabulary([PAD, BOS, EOS, "?", "+", "-", *digits, *names]))
        self.lines = lines
        self.lines_per_thought = lines_per_thought
        self.step_tokens = lines_per_thought * LINE_TOKENS
        self._ask = self.vocab["?"]
        self._names = {k: [self.vocab[f"{k}{n}"] for n in range(NAMES)] for k in "LvUM"}
        self._digits = [self.vocab[str(d)] for d in range(MODULUS)]
        self._ops = {op: self.vocab[op] for op in "+-"}
        self._label_number = {token: n for n, token in enumerate(self._names["L"])}

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sensible reasoning: every line, answer, end marker."""
        return self.lines * LINE_TOKENS + ANSWER_TOKENS + 1

    def problem(self, split: str, index: int, *, lines: int | None = None) -> Problem:
        """Return problem `index` of `split` with `lines` program lines."""
        count = self.lines if lines is None else lines
        rng = np.random.default_rng([_TASK_SEED, SPLIT_SEEDS[split], count, index])
        program = random_program(rng, count)
        return Problem(self.name, split, index, tuple(self.prompt(program)), program)

    def num_problems(self, split: str) -> int | None:
        """Return None: problems are drawn at random, without end."""
        if split not in SPLIT_SEEDS:
            raise KeyError(split)
        return None

    def prompt(self, program: Program) -> list[int]:
        """Return the prompt's ids, 5 per program line and 4 more."""
        ids = [self.vocab.bos_id]
        for k, (op, (a, b)) in enumerate(zip(program.ops, program.operands, strict=True)):
            n = (program.offset + k) % NAMES
            ids += [self._names["L"][n], self._operand(program, "U", a), self._ops[op]]
            ids += [self._names["M"][n], self._operand(program, "U", b)]
        end = (program.offset + program.lines) % NAMES
        return [*ids, self._names["L"][end], self._ask, self._operand(program, "U", program.query)]

    def line(self, program: Program, k: int) -> list[int]:
        """Return the nine ids that evaluate program line `k`."""
        n = (program.offset + k) % NAMES
        a, b = program.operands[k]
        x, y = (program.values[j] if j >= 0 else -1 - j for j in (a, b))
        return [
            self._names["L"][n],
            self._operand(program, "v", a),
            self._digits[x],
            self._ops[program.ops[k]],
            self._names["M"][n],
            self._operand(program, "v", b),
            self._digits[y],
            self._names["v"][n],
            self._digits[program.values[k]],
        ]

    def answer(self, program: Program) -> list[int]:
        """Return the three ids of the answer line."""
        value = self._digits[program.values[program.query]]
        return [self._ask, self._operand(program, "v", program.query), value]

    def answer_text(self, generated: Sequence[int]) -> str | None:
        """Return the words of the answer line; None if there is none before the end marker."""
        finish = self._finish(generated) or 0
        line = generated[max(0, finish - ANSWER_TOKENS) : finish]
        return self.text(line) if len(line) == ANSWER_TOKENS and line[0] == self._ask else None

    def reasoning(self, program: Program, lines: Iterable[int]) -> list[int]:
        """Return the ids that evaluate `lines` in this order, then answer."""
        ids = [token for k in lines for token in self.line(program, k)]
        return ids + self.answer(program)

    def solution(self, problem: Problem) -> list[int]:
        """Return the shortest correct reasoning: the needed lines, then the answer."""
        return self.reasoning(problem.data, problem.data.needed)

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        """Tell whether `generated` holds a complete answer line or the end marker."""
        return self._finish(generated) is not None

    def is_thought_end(
        self, problem: Problem, generated: Sequence[int], block_tokens: int = 0
    ) -> bool:
        """Tell whether the last token closes a block of lines, or everything."""
        if not generated:
            return False
        return len(generated) % self.step_tokens == 0 or self.is_finished(problem, generated)

    def judge(self, problem: Problem, generated: Sequence[int]) -> Verdict:
        """Verify token by token; what follows the finish is ignored.

        A path is dead from the first token that no correct reasoning has there:
        a label out of order, of a line whose operand is missing, or past a
        needed line, any wrong token within a line, a premature or wrong answer.
        """
        finish = self._finish(generated)
        verdict = self._judge(problem.data, generated[:finish])
        if finish is None or verdict.finished:
            return verdict
        # The end marker came before an answer, or an answer after a wrong line.
        return Verdict(False, True, True, verdict.progress, 0)

    def _judge(self, program: Program, tokens: Sequence[int]) -> Verdict:
        """Verify tokens that hold no end marker and nothing after an answer."""
        evaluated: set[int] = set()
        pending = list(reversed(program.needed))
        last = -1
        for start in range(0, max(len(tokens), 1), LINE_TOKENS):
            part = list(tokens[start : start + LINE_TOKENS])
            progress = 1.0 - len(pending) / len(program.needed)
            todo = len(pending) * LINE_TOKENS + ANSWER_TOKENS
            if not part:
                return Verdict(False, False, False, progress, todo)
            if part[0] == self._ask:
                right = not pending and part == self.answer(program)[: len(part)]
                done = len(part) >= ANSWER_TOKENS
                left = ANSWER_TOKENS - len(part) if right else 0
                return Verdict(right and done, done, not right, progress, left)
            k = self._choice(program, part[0])
            if (
                not last < k < program.lines
                or (pending and k > pending[-1])
                or any(j >= 0 and j not in evaluated for j in program.operands[k])
                or part != self.line(program, k)[: len(part)]
            ):
                return Verdict(False, False, True, progress, 0)
            if len(part) < LINE_TOKENS:
                todo -= len(part) if pending and k == pending[-1] else len(part) - LINE_TOKENS
                return Verdict(False, False, False, progress, todo)
            last = k
            evaluated.add(k)
            if pending and k == pending[-1]:
                pending.pop()
        progress = 1.0 - len(pending) / len(program.needed)
        return Verdict(False, False, False, progress, len(pending) * LINE_TOKENS + ANSWER_TOKENS)

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int]:
        """Return how many needed lines are written as they should be, and how many are needed."""
        program: Program = problem.data
        tokens = list(generated[: self._finish(generated)])
        lines = range(0, len(tokens), LINE_TOKENS)
        written = {tuple(tokens[start : start + LINE_TOKENS]) for start in lines}
        right = sum(tuple(self.line(program, k)) in written for k in program.needed)
        return right, len(program.needed)

    def readers(self, problem: Problem, generated: Sequence[int], start: int = 0) -> list[Readers]:
        """Return who reads each token (`Task.readers`); steps are program lines, then the answer.

        A prompt line is read when it is evaluated, and may be as long as no later one was.  The
        question is read to the end.  Of a reasoning line, all is read until it is complete, the
        label by the choice of the next line, and name and result by every line that has it as an
        operand.
        """
        program: Program = problem.data
        prompt = len(problem.prompt)
        rows: list[Readers] = []
        for at in range(start, prompt):
            line = min(max(0, at - 1) // PROMPT_LINE_TOKENS, program.lines)
            rows.append((0, line))
        for at in range(max(0, start - prompt), len(generated)):
            first = at - at % LINE_TOKENS
            if generated[first] in (self._ask, self.eos_id):
                answered = at - first >= ANSWER_TOKENS - 1
                rows.append((program.lines + answered, program.lines))
                continue
            k = self._choice(program, generated[first])
            if not 0 <= k < program.lines:
                now = self._next_line(program, generated, first)
                rows.append((now, now))
                continue
            inside = at - first
            steps: list[int] = []
            if inside == 0:
                steps = [k + 1]
            elif inside >= LINE_TOKENS - 2:
                steps = self._readers_of(program)[k]
            rows.append((k + (inside == LINE_TOKENS - 1), k, *steps))
        return rows

    def _next_line(self, program: Program, generated: Sequence[int], end: int) -> int:
        """Return the line after the last one that begins before `end`; 0 without any."""
        for first in range(end - LINE_TOKENS, -1, -LINE_TOKENS):
            k = self._choice(program, generated[first])
            if 0 <= k < program.lines:
                return k + 1
        return 0

    @staticmethod
    @lru_cache(maxsize=64)
    def _readers_of(program: Program) -> list[list[int]]:
        """Return the lines that have each line's result as an operand; the answer is the last."""
        found: list[list[int]] = [[] for _ in range(program.lines)]
        for k, pair in enumerate(program.operands):
            for operand in sorted({j for j in pair if j >= 0}):
                found[operand].append(k)
        found[program.query].append(program.lines)
        return found

    def _operand(self, program: Program, kind: str, operand: int) -> int:
        if operand < 0:
            return self._digits[-1 - operand]
        return self._names[kind][(program.offset + operand) % NAMES]

    def _choice(self, program: Program, token: int) -> int:
        """Return the program line a label token stands for, -1 if it is no label."""
        n = self._label_number.get(token)
        return -1 if n is None else (n - program.offset) % NAMES

    def _finish(self, generated: Sequence[int]) -> int | None:
        """Return the length up to the finish (end marker excluded), if there is one."""
        if self._ask not in generated and self.eos_id not in generated:
            return None  # at the speed of C: searches ask at every token
        for i, token in enumerate(generated):
            if token == self.eos_id:
                return i
            if token == self._ask and i + ANSWER_TOKENS <= len(generated):
                return i + ANSWER_TOKENS
        return None
