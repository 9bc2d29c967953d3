"""Commands in documents: those of the README and the five-minute start run, all others parse."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest

from arborsim.cli.app import load, main
from tests.test_documents import DOCUMENTS, ROOT

#: Documents whose commands are run, in their order.
RUN = ("README.md", "docs/index.md", "docs/start.md", "docs/importing.md", "docs/results.md")
#: What is made smaller where commands run, as that they run is what is tested.
SMALLER = {"--episodes 8": "--episodes 1", "--quick": "--quick --searches 8"}
#: Written in documents for names of the reader's own.
PLACEHOLDERS = re.compile(r"\b(COMMAND|NAME|FORMAT)\b")


def blocks(path: Path, *languages: str) -> Iterator[str]:
    """Code blocks of a document in these languages."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S):
        if language in languages:
            yield block


def commands(path: Path) -> Iterator[str]:
    """Lines of code blocks, whole and without comments."""
    for block in blocks(path, "", "bash"):
        if block.startswith("$ "):  # with what it prints: tests/test_readme.py compares that
            continue
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if command := re.sub(r"\s+#.*|^#.*", "", line).strip():
                yield command


#: Each command once, under the first document that has it.
RUNS = list({c: (name, c) for name in reversed(RUN) for c in commands(ROOT / name)}.values())
RUNS.sort(key=lambda run: RUN.index(run[0]))  # stable: as written
OTHERS = sorted(
    {
        (str(path.relative_to(ROOT)), command)
        for path in DOCUMENTS
        for command in commands(path)
        if re.match(r"(\w+=\S+ )*arborsim ", command) and str(path.relative_to(ROOT)) not in RUN
    }
)


PYTHON = {
    block: name
    for name in ("docs/trace-format.md", *reversed(RUN))
    for block in blocks(ROOT / name, "python")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped traces, where one command may use what another wrote."""
    made = tmp_path_factory.mktemp("commands")
    (made / "traces").mkdir()
    for each in (ROOT / "traces").iterdir():
        (made / "traces" / each.name).symlink_to(each)
    tree = made / "traces" / "chain-tree.parquet"  # of which two searches are enough
    tree.unlink()
    whole = pq.ParquetFile(ROOT / "traces" / tree.name)
    with pq.ParquetWriter(tree, whole.schema_arrow) as writer:
        for search in range(2):
            writer.write_table(whole.read_row_group(search))
    return made


@pytest.mark.parametrize(("document", "command"), RUNS, ids=[f"{d}: {c}" for d, c in RUNS])
def test_commands_of_readme_and_start_run(
    document: str,
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for whole, smaller in SMALLER.items():
        command = command.replace(whole, smaller)
    program, *arguments = shlex.split(command)
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = set(re.findall(r"\[(.*?)\]", command))
        assert arguments[0] == "install"
        assert wanted <= set(extras["optional-dependencies"])
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
    else:
        assert program == "arborsim"
        if arguments[0] in ("live", "record", "validate"):
            pytest.importorskip("torch")
        monkeypatch.chdir(folder)
        into = arguments.index(">") if ">" in arguments else len(arguments)
        for written in ("--out", "--report"):  # by an earlier command, or an earlier document
            if written in arguments:
                Path(arguments[arguments.index(written) + 1]).unlink(missing_ok=True)
        assert main(arguments[:into]) == 0
        shown = capsys.readouterr().out
        assert shown.strip()
        for target in arguments[into + 1 :]:
            Path(target).write_text(shown)


@pytest.mark.parametrize("block", PYTHON, ids=PYTHON.values())
def test_python_in_documents_runs(
    block: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    exec(block, {})


@pytest.mark.parametrize(("document", "command"), OTHERS, ids=[f"{d}: {c}" for d, c in OTHERS])
def test_commands_of_other_documents_parse(document: str, command: str) -> None:
    if PLACEHOLDERS.search(command):
        pytest.skip("a placeholder")
    command = re.sub(r" \$\w+", "", command)
    words = shlex.split(re.sub(r"\$\(.*\)|\[[^\]]*\]", "x", command))
    words = words[words.index("arborsim") + 1 :]
    stops = [i for i, word in enumerate(words) if word in (">", "|", "&&")]
    name, *arguments = words[: stops[0] if stops else len(words)]
    if name.startswith("-"):
        return
    made = load(name)
    subcommands = getattr(made, "commands", {})
    if subcommands:
        made, arguments = subcommands[arguments[0]], arguments[1:]
    try:
        made.make_context(f"arborsim {name}", arguments)
    except click.ClickException as error:
        raise AssertionError(f"{document}: {command}\n{error.format_message()}") from error
