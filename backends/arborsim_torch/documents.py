"""The documents of a fidelity run: pieces of texts, prompts with what followed, or problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.core.tiers import Budget
from arborsim.play.fidelity import FOLLOWED, FidelityRequest
from arborsim.play.problem_sets import ProblemChoice, read_lines, read_problems, read_text
from arborsim_torch.given_file import GivenSearch, Words
from arborsim_torch.models import LoadedModel, eos_ids
from arborsim_torch.recording_plan import words_of
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sources import PromptSource, RandomSource, Source, TaskSource
from arborsim_torch.text_task import TextTask

_DEFAULT_PROBLEMS = 8
_LEAST = 2  # tokens after the prompt: the first is full retention's, whatever the policy


@dataclass(frozen=True)
class Document:
    """A prompt and what follows it; nothing yet if full retention is to generate it."""

    name: str
    kind: str  #: "texts", "prompts" or the name of a task
    problem: Problem
    tokens: tuple[int, ...] = ()

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.problem.prompt)

    @property
    def length(self) -> int:
        """Tokens, prompt included."""
        return len(self.prompt) + len(self.tokens)


class DocumentSource(Source):
    """A document as the problem of a search, whose thoughts end as `base` says."""

    def __init__(self, base: Source, document: Document, words: Words) -> None:
        self.name, self.max_tokens = base.name, len(document.tokens)
        self._base, self._document = base, document
        self._ends = frozenset(words.cut(document.prompt, document.tokens))

    def count(self, first: int) -> int | None:
        return max(0, 1 - first)

    def problem(self, index: int) -> Problem:
        return self._document.problem

    def is_thought_end(self, problem: Problem, generated: Sequence[int], block_tokens: int) -> bool:
        return len(generated) in self._ends

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        return len(generated) == self.max_tokens

    def text(self, ids: Sequence[int]) -> str:
        return self._base.text(ids)


def documents_of(request: FidelityRequest, loaded: LoadedModel) -> tuple[list[Document], Source]:
    """The documents asked for, and what knows where their thoughts end.

    Raises `UsageError`, which names the file: there is no tokeniser, the model cannot read all
    tokens, or a document is too short.
    """
    if request.texts:
        found, kind = _texts(request, loaded), "--text"
    elif request.prompts is not None:
        found, kind = _prompts(request, loaded, request.prompts), "--prompts"
    else:
        found, kind = _problems(request, loaded), "--model"
    last = request.first + request.episodes if request.episodes else None
    chosen = found[request.first : last]
    if not chosen:
        raise UsageError(f"--first {request.first}: there are {len(found)} documents ({kind})")
    for document in chosen:
        _check(request, loaded, document)
    return chosen, _base(request, loaded)


def _base(request: FidelityRequest, loaded: LoadedModel) -> Source:
    most = request.max_tokens or request.document_tokens
    if loaded.task is not None:
        return TaskSource(loaded.task, request.split)
    if loaded.tokenizer is None:
        return RandomSource(loaded.model.config.vocab_size, 1, most, request.thought_tokens)
    lengths = (most, request.thought_tokens)
    return PromptSource([], loaded.tokenizer, eos_ids(loaded), *lengths, request.stop)


def _check(request: FidelityRequest, loaded: LoadedModel, document: Document) -> None:
    """Refuse a document that says nothing, or that the model cannot read."""
    generated = request.max_tokens if not document.tokens else 0
    longest = document.length + generated
    if longest > loaded.max_positions:
        raise UsageError(
            f"{document.name}: {longest} tokens, but {loaded.name} has {loaded.max_positions} "
            "positions: give --tokens or --generate a smaller number"
        )
    given = document.kind == "texts" or document.tokens
    if given and len(document.tokens) < _LEAST:
        raise UsageError(
            f"{document.name}: {len(document.tokens)} tokens follow the prompt of "
            f"{len(document.prompt)}: give a longer text, or a smaller --prefill"
        )
    budgets = [cell.budget for cell in request.cells if cell.policy.uses_budget]
    for budget in budgets:
        if budget.tokens is not None and document.tokens and budget.tokens >= document.length:
            raise UsageError(
                f"{document.name}: its {document.length} tokens fit into --budget {budget.text}, "
                "so nothing would be removed: give a longer text, or a smaller budget or a share"
            )


def _texts(request: FidelityRequest, loaded: LoadedModel) -> list[Document]:
    """Pieces of files, of `document_tokens` each.

    What is left at the end of a file is one, too, if it has half of that, or is all there is.
    """
    tokenizer, size, found = loaded.tokenizer, request.document_tokens, list[Document]()
    if tokenizer is None:
        raise UsageError(
            f"--text {request.texts[0]}: {loaded.name} has no tokeniser of text: give --prompts "
            "with token ids"
        )
    for path in request.texts:
        text = read_text(path)
        plain = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        whole = list(tokenizer(text, verbose=False)["input_ids"])
        begin = whole[:1] if whole[:1] == [tokenizer.bos_token_id] != plain[:1] else []
        step = max(1, size - len(begin))
        pieces = [begin + plain[at : at + step] for at in range(0, len(plain), step)]
        if len(pieces) > 1 and 2 * len(pieces[-1]) < size:
            del pieces[-1]
        if not pieces:
            raise UsageError(f"{path}: the text has no tokens")
        for number, ids in enumerate(pieces, 1):
            name = path.name if len(pieces) == 1 else f"{path.name}, part {number}"
            found.append(_cut(name, len(found), ids, request.prefill))
    return found


def _cut(name: str, index: int, ids: list[int], prefill: Budget) -> Document:
    head = max(1, min(prefill.in_tokens(len(ids)), len(ids) - 1))
    problem = Problem("texts", "text", index, tuple(ids[:head]), None)
    return Document(name, "texts", problem, tuple(ids[head:]))


def _prompts(request: FidelityRequest, loaded: LoadedModel, path: Path) -> list[Document]:
    """Chains of a file, or prompts alone, for which a token stands in until theirs are known."""
    choice = request.problems
    if choice is not None and (choice.path is None or choice.recipe or choice.fields):
        return _posed(choice, request, loaded)
    words, found = words_of(loaded, request.chat, _base(request, loaded)), list[Document]()
    for number, entry in read_lines(path, FOLLOWED):
        where, given = f"{path}, line {number}", entry.get("tokens") is not None
        if not given and not request.max_tokens:
            raise UsageError(
                f'{where}: no "tokens" that follow the prompt: add them, or let full retention '
                "generate some: --generate N"
            )
        search = GivenSearch(where, entry if given else {**entry, "tokens": [0]})
        if not search.chain:
            raise UsageError(f"{where}: a tree: give the tokens of one path")
        prompt, *thoughts = search.tree(words).nodes
        tokens = tuple(token for thought in thoughts for token in thought.tokens)
        problem = Problem("prompts", "prompts", len(found), tuple(prompt.tokens), None)
        name = f"{path.name}, line {number}"
        found.append(Document(name, "prompts", problem, tokens if given else ()))
    return found


def _posed(choice: ProblemChoice, request: FidelityRequest, loaded: LoadedModel) -> list[Document]:
    """Problems for full retention to answer."""
    if loaded.tokenizer is None or not request.max_tokens:
        raise UsageError(f"--prompts {request.prompts}: give a language model, and --generate N")
    problems, ends = read_problems(choice), (request.stop, request.chat)
    lengths = (request.max_tokens, request.thought_tokens)
    task = TextTask(problems, loaded.tokenizer, eos_ids(loaded), *lengths, *ends)
    numbers = range(len(problems.prompts))
    return [Document(f"{task.name} {n}", "prompts", task.problem("", n)) for n in numbers]


def _problems(request: FidelityRequest, loaded: LoadedModel) -> list[Document]:
    if loaded.task is None:
        raise UsageError(f"--model {request.model} has no task: give --text or --prompts")
    source = TaskSource(loaded.task, request.split)
    known = source.count(0)
    asked = request.first + (request.episodes or _DEFAULT_PROBLEMS)
    numbers = range(asked if known is None else min(asked, known))
    name = loaded.task.name
    return [Document(f"{name} {n}", name, source.problem(n)) for n in numbers]
