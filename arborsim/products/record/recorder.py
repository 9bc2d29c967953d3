"""`arborsim.Recorder`: searches that a program runs itself, with any engine, as a trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable, output_path
from arborsim.play.given import PROMPT, TreeBuilder
from arborsim.products.record.ask import CaptureOptions, stored_fields


class Recorder:
    """Record searches that a loop of your own runs, with all signals that policies read.

    The loop may run anywhere.  It hands over tokens, and `model` computes every tree of them once
    more, in blocks, when its search is over.  Token ids need no tokeniser.

    Parameters
    ----------
    out
        The trace to make.
    model
        A causal language model of transformers (a module, which is left as it was), or a folder or
        name as of ``record --model``.
    tokenizer
        Makes ids of text, and text of ids; that of the folder unless it is given.
    search
        The search's name, for reports.
    chat
        Put prompts that are text into the tokeniser's chat template.
    device, dtype
        Where and in which type to load a model by name.
    overwrite, resume
        Replace the file, or add to it.
    **stored
        What is stored: `capture`, `attention`, `qkv_layers` and the others of `record`.

    Raises
    ------
    UsageError
        The model or the file cannot be used, or a search is given that cannot be.

    Examples
    --------
    >>> import arborsim
    >>> with arborsim.Recorder("out.parquet", model="chain") as r:  # doctest: +SKIP
    ...     root = r.prompt([3, 4, 5])
    ...     first, other = r.add(root, [6, 7], reward=0.9), r.add(root, [8], reward=0.1)
    ...     r.prune(other)
    ...     r.answer(r.add(first, [9]), correct=True)

    Notes
    -----
    A search is whole, and safe on disk, with `answer`, or when the next `prompt` or the end of the
    block comes.  If the block raises, the file holds the whole searches before.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        model: Any,
        tokenizer: Any = None,
        search: str = "given",
        chat: bool = False,
        device: str = "cpu",
        dtype: str = "auto",
        overwrite: bool = False,
        resume: bool = False,
        **stored: Any,
    ) -> None:
        from arborsim.play.backends import RecordRequest, get_backend

        path = output_path(out)
        check_writable(path, "out")
        if path.exists() and not (overwrite or resume):
            raise UsageError(f"{path} exists: choose another name, or overwrite or resume it")
        model = os.fspath(model) if isinstance(model, str | Path) else model
        request = RecordRequest(
            model=model if isinstance(model, str) else "",
            out=path,
            chat=chat,
            device=device,
            dtype=dtype,
            overwrite=overwrite,
            resume=resume,
            command="arborsim.Recorder",
            **stored_fields(CaptureOptions(**stored)),
        )
        self._recording = get_backend().record_trees(request, model, tokenizer, search)
        self._builder: TreeBuilder | None = None
        self.episodes = 0  #: searches that are on disk

    def prompt(self, tokens: str | Sequence[int]) -> int:
        """Begin a search; ids or text of its prompt.  Returns the prompt's node."""
        ids = self._ids(tokens, is_prompt=True)
        self._finish()
        builder = TreeBuilder(self._recording.vocabulary, self._recording.longest)
        builder.prompt(ids)
        self._builder = builder
        return PROMPT

    def add(
        self,
        parent: int,
        tokens: str | Sequence[int],
        *,
        reward: float | None = None,
        text: str | None = None,
        answer: str | None = None,
        correct: bool | None = None,
        order: int | None = None,
    ) -> int:
        """Add a complete thought under a node, and return its own.

        Parameters
        ----------
        reward
            In [0, 1].
        text
            What `tokens` read, if that is not what the tokeniser says.
        answer, correct
            What a finished thought answers, and whether that is right.
        order
            Thoughts of one order ran side by side.  Without, a thought ran together with those
            added before it, unless it follows one of them, or something has been given up since.
        """
        known: dict[str, Any] = {"reward": reward, "text": text, "answer": answer}
        ids = self._ids(tokens)
        return self._open.add(parent, ids, step=order, correct=correct, **known)

    def prune(self, node: int) -> None:
        """The search gives a node up: nothing will follow it."""
        self._open.prune(node)

    def answer(self, node: int, *, correct: bool | None = None, text: str | None = None) -> None:
        """The search hands in a node, and is over: it is computed and stored."""
        self._open.answer(node, correct, text)
        self._finish()

    @property
    def _open(self) -> TreeBuilder:
        if self._builder is None:
            raise UsageError("no search is open: begin one with prompt()")
        return self._builder

    def _ids(self, tokens: Any, is_prompt: bool = False) -> Sequence[int]:
        if isinstance(tokens, str):
            return self._recording.encode(tokens, is_prompt)
        ids: Sequence[int] = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        return ids

    def _finish(self) -> None:
        builder, self._builder = self._builder, None
        if builder is not None:
            self._recording.write(builder.tree())
            self.episodes += 1

    def close(self) -> None:
        """Store the search that is open, and make the file."""
        try:
            self._finish()
        finally:
            self._recording.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        if kind is not None:
            self._builder = None  # it is not whole
        self.close()
