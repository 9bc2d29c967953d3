"""What `mkdocs` runs: pages that are made from the code, and links to files outside of ``docs``.

Pages that lie elsewhere in the repository (`ELSEWHERE`) and tutorials (notebooks) become pages of
the site; what ``<!-- reference -->`` stands for and figures are filled in.  `fill.py` writes
commands, columns and a list of what `arborsim` exports into the pages themselves.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT), str(ROOT / "backends"), str(DOCS / "tools")]
#: Pages of the site that are made of files elsewhere in the repository.
ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "reports/quality.md": "reports/quality/README.md",
    "reports/search.md": "reports/search/README.md",
    "reports/claims.md": "reports/claims/README.md",
    "reports/reference-models.md": "backends/arborsim_torch/reference/README.md",
    "reports/traces.md": "traces/README.md",
}
REPOSITORY = "https://github.com/arborsim/arborsim/blob/main"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)(\{[^}]*\})?")
_CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add what lies elsewhere, and the notebooks."""
    from mkdocs.structure.files import File

    for name, path in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    for path in sorted(DOCS.glob("tutorials/*.ipynb")):
        title, _, rest = notebook(json.loads(path.read_text())).partition("\n")
        where = f"{REPOSITORY}/{path.relative_to(ROOT)}"
        said = f"*A notebook: [docs/tutorials/{path.name}]({where}), with what it printed.*"
        made = f"{title}\n\n{said}\n{rest}"
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=made))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in what is made from the code, then figures and links."""
    if "<!-- reference -->" in markdown:  # the site has all members, from the docstrings
        head, _, rest = markdown.partition("<!-- reference -->")
        markdown = head + "\n".join(api()) + rest.partition("<!-- /reference -->")[2]
    here = page.file.src_uri
    source = ELSEWHERE.get(here, f"docs/{here}")
    parts, end = [], 0
    for code in _CODE.finditer(markdown):  # links in code are no links
        parts += [_linked(markdown[end : code.start()], here, source), code.group()]
        end = code.end()
    return "".join([*parts, _linked(markdown[end:], here, source)])


def _linked(text: str, here: str, source: str) -> str:
    pages = {path: name for name, path in ELSEWHERE.items()}

    def replaced(match: re.Match[str]) -> str:
        image, said, target, anchor, _ = match.groups()
        if not target or "://" in target:
            return match.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if image and 'class="figure"' in (ROOT / path).read_text()[:200]:
            return figure(ROOT / path)
        if path in pages:
            path = pages[path]
        elif path.startswith("docs/") and not (ROOT / path).is_dir():
            path = path.removeprefix("docs/").replace(".ipynb", ".md")
        else:
            return f"[{said}]({REPOSITORY}/{path}{anchor or ''})"
        path = posixpath.relpath(path, posixpath.dirname(here) or ".")
        return f"{image}[{said}]({path}{anchor or ''})"

    return _LINK.sub(replaced, text)


def figure(path: Path) -> str:
    """A drawing as part of the page, whose colours follow the page's scheme."""
    drawn = re.sub(r"\n\s*", " ", path.read_text().strip())
    return f"\n<figure>{drawn}</figure>\n"


def commands() -> Iterator[str]:
    """Every command with its options; those of several commands stand once, at the end."""
    from arborsim.cli.app import COMMANDS, load

    named: list[tuple[str, Any]] = []
    for name in COMMANDS:
        made = load(name)
        if not hasattr(made, "commands"):
            named.append((name, made))
        below = dict(getattr(made, "commands", {}), **getattr(made, "others", {}))
        named += [(f"{name} {each}", sub) for each, sub in below.items()]
    rows = {
        name: [
            option
            for options in made.panels(made.make_context(name, [], resilient_parsing=True)).values()
            for option in options
            if option[0] != "--help"
        ]
        for name, made in named
    }
    count = Counter(option for options in rows.values() for option in options)
    for name, made in named:
        own = [option for option in rows[name] if count[option] == 1]
        shared = [option.split()[0] for option, about in rows[name] if count[option, about] > 1]
        about = _paragraphs(made.help or "").partition("\n\n")[0]
        yield from ("", f"## arborsim {name}", "", about, "")
        yield from _listed(own)
        if shared:
            yield f"- also {' '.join(f'`{each}`' for each in shared)}"
    yield from ("", "## Options of several commands", "")
    yield from _listed(sorted(option for option, times in count.items() if times > 1))


def _listed(options: list[tuple[str, str]]) -> Iterator[str]:
    for option, about in options:
        yield f"- `{option}` {_cell(' '.join(about.split()))}"


def _cell(text: str) -> str:
    text = html.escape(text.replace("`", "\0"), quote=False).replace("\0", "`")
    return re.sub(r"([|*_])", r"\\\1", text)


def _paragraphs(text: str) -> str:
    return html.escape(re.sub(r"[\b]\n?", "", text), quote=False)


def reference() -> Iterator[str]:
    """Functions with the names of their parameters, and what they return, a line each."""
    import inspect

    import arborsim
    from arborsim.products.declare import declared

    def first(thing: Any) -> str:
        said = inspect.cleandoc(inspect.getdoc(thing) or "")
        return _cell(said.partition("\n\n")[0].replace("\n", " "))

    exported = {name: getattr(arborsim, name) for name in arborsim.__all__}
    for name, each in sorted(exported.items(), key=lambda item: isinstance(item[1], type)):
        each = getattr(each, "_function", each)  # of a package that has the function's name
        yield from ("", f"**`{name}`** {first(each)}")
        if hasattr(each, "options"):
            options = sorted(declared(each.options), key=lambda one: not one.positional)
            yield f"Parameters: {', '.join(f'`{one.name}`' for one in options)}."


def api() -> Iterator[str]:
    """Everything that `arborsim` exports: functions first, then what they return."""
    import arborsim

    exported = {name: getattr(arborsim, name) for name in arborsim.__all__}
    for name, each in sorted(exported.items(), key=lambda item: isinstance(item[1], type)):
        each = getattr(each, "_function", each)  # of a package that has the function's name
        if hasattr(each, "options"):
            yield from _call(name, each)
            continue
        yield from (
            f"::: {each.__module__}.{name}",
            "    options:",
            "      inherited_members: true",
        )


def _call(name: str, function: Any) -> Iterator[str]:
    """A function that is declared by its options (`arborsim.products.declare`)."""
    import inspect
    from dataclasses import MISSING

    from arborsim.products.declare import declared

    said = inspect.cleandoc(function.__doc__)
    about, _, rest = said.partition("\nParameters\n")
    example = rest.partition("\nExamples\n--------\n")[2]
    options = sorted(declared(function.options), key=lambda each: not each.positional)
    yield from ("", f'## <span id="arborsim.{name}"></span>`{name}`', "", about.strip(), "")
    yield from ("| parameter | default | meaning |", "| --- | --- | --- |")
    for each in options:
        shown = f": {each.option.shown}" if each.option.shown else ""
        default = "" if each.default is MISSING else f"`{each.default!r}`{shown}"
        yield f"| `{each.name}` | {default} | {_cell(' '.join(each.about.split()))} |"
    yield from ("", "```python", example.strip(), "```", "")
    result = re.search(r"\nReturns\n-------\n(.*)", rest)
    yield from ("", f"Returns `{result.group(1)}`.", "") if result else ()


def columns() -> Iterator[str]:
    """Columns of a trace and the file's metadata, from the schema."""
    from arborsim.trace import schema

    tables = (
        ("Every trace", "structure"),
        ("Capture level signals", "signals"),
        ("Attention, whole rows", "attention_dense"),
        ("Attention, sparse rows", "attention_sparse"),
        ("Attention of single layers (`--attention-layers`)", "attention_layers"),
        ("Outputs of layers (`--hidden-layers`)", "hidden"),
        ("Capture level qkv", "qkv"),
        ("Imported requests", "requests"),
        ("Packed traces (version 2)", "run"),
    )
    yield from ("## Columns", "", "Units and meanings are in the metadata of each column, too.", "")
    for title, name in tables:
        yield from (f"### {title}", "", "| column | type | unit | meaning |", "|---|---|---|---|")
        for field in schema.COLUMNS[name]:
            unit, about = (field.metadata[key].decode() for key in (b"unit", b"about"))
            kind = str(field.type).replace("halffloat", "float16").replace("element: ", "")
            kind = re.sub(r"dictionary<values=string.*", "string (dictionary)", kind)
            yield f"| `{field.name}` | {_cell(kind)} | {unit or '-'} | {_cell(about)} |"
        yield ""
    yield from ("### Values of `kind`", "", "| value | what the row records |", "|---|---|")
    for name, about in _commented(schema.Kind):
        yield f"| `{name.lower()}` | {_cell(about)} |"
    yield from ("", "### Values of `end`", "", "| value | meaning |", "|---|---|")
    for name, about in _commented(schema.End):
        yield f"| {'null' if name == 'NONE' else f'`{name.lower()}`'} | {_cell(about)} |"
    key = schema.METADATA_KEY.decode()
    yield from (
        "", "## Metadata", "",
        f"JSON under the key `{key}` of the Parquet schema; the version stands under "
        f"`{schema.VERSION_KEY.decode()}`.",
        "", "| key | type | meaning |", "|---|---|---|",
    )  # fmt: skip
    meant = dict(_commented(schema.TraceInfo))
    for name, kind in schema.TraceInfo.__annotations__.items():
        yield f"| `{name}` | `{kind.replace('|', 'or')}` | {_cell(meant.get(name, ''))} |"


def _commented(kind: type) -> Iterator[tuple[str, str]]:
    """Members of an enum, or fields, and the comments behind or above them."""
    import inspect

    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if found := re.match(r"\s+#: (.*)", line):
            above.append(found.group(1))
        elif found := re.match(r"\s+(\w+)(?: = \d+|: [^=#]+(?: = .*?)?)(?:  # (.*))?$", line):
            yield found.group(1), found.group(2) or " ".join(above)
            above = []


def notebook(stored: dict[str, Any]) -> str:
    """A notebook with its stored outputs as Markdown."""
    parts: list[str] = []
    for cell in stored["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{text}\n```")
            parts += (_output(each) for each in cell["outputs"])
    return "\n\n".join(part for part in parts if part)


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        drawn = re.sub(r"\n\s*", " ", "".join(data["image/svg+xml"]).strip())
        return f"<figure>{drawn}</figure>"
    if "text/html" in data:
        made = re.sub(r"\n\s*", " ", "".join(data["text/html"]).strip())
        return f'<div class="output">{made}</div>'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```{{.text .output}}\n{text.rstrip()}\n```" if text.strip() else ""
