"""Files about the project as a whole name what there is: the citation and the Dockerfile."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from arborsim import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What Citation File Format 1.2.0 demands, and the types of what else the file says.
CITATION = {"cff-version": str, "message": str, "title": str, "authors": list}
OTHERS = {"type": str, "abstract": str, "version": str, "license": str, "repository-code": str,
          "keywords": list, "date-released": str, "doi": str, "url": str}  # fmt: skip


def test_the_citation_is_valid_and_of_this_version() -> None:
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert said.keys() >= CITATION.keys()
    assert said.keys() <= (CITATION | OTHERS).keys()
    for key, value in said.items():
        assert isinstance(value, (CITATION | OTHERS)[key]), key
    assert said["cff-version"] == "1.2.0"
    assert said["type"] in ("software", "dataset")
    assert all(author.get("name") or author.get("family-names") for author in said["authors"])
    assert said["version"] == __version__
    assert said["license"] == PROJECT["license"]
    assert said["keywords"] == PROJECT["keywords"]
    assert PROJECT["urls"]["Documentation"].startswith(said["repository-code"])


def test_what_is_tracked_stays_small() -> None:
    """Results and weights are; pages that a command makes are not."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("these sources are not a checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(path.stat().st_size for path in paths if path.is_file()) < 62 << 20
    assert [path for path in paths if path.match("reports/**/index.html")] == []


@pytest.fixture(scope="module")
def dockerfile() -> list[list[str]]:
    """Its instructions, as words."""
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip()]


def test_the_dockerfile_copies_what_the_package_is_built_from(dockerfile) -> None:
    copied = [word for words in dockerfile if words[0] == "COPY" for word in words[1:-1]]
    needed = ["pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]]
    assert all(any(path == name or path.startswith(f"{name}/") for name in copied)
               for path in needed)  # fmt: skip
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    packages = {"arborsim", "backends"}  # where pyproject.toml finds packages
    assert packages <= set(copied)


def test_the_dockerfile_installs_extras_that_there_are(dockerfile) -> None:
    stages = {words[3]: words[1] for words in dockerfile if words[0] == "FROM"}
    assert {"core", "cuda"} <= stages.keys()
    python = re.match(r"python:(3\.\d+)-", stages["source"])
    assert python is not None
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert int(low) <= int(python[1].partition(".")[2]) < int(high)
    installs = [words for words in dockerfile if "pip" in words]
    asked = [word.strip('"') for words in installs for word in words if word.strip('"')[0] == "."]
    assert asked[0] == "."  # core: no extra
    extras = {name for word in asked[1:] for name in word[2:-1].split(",")}
    assert "torch" in extras
    assert extras <= PROJECT["optional-dependencies"].keys()
    for words in installs:
        assert words[words.index("--constraint") + 1] == "constraints.txt"


def test_the_dockerfile_runs_a_command_and_not_as_root(dockerfile) -> None:
    from arborsim.cli.app import COMMANDS

    points = [words for words in dockerfile if words[0] == "ENTRYPOINT"]
    assert all(" ".join(words[1:]) == '["arborsim"]' for words in points)
    assert "arborsim" in PROJECT["scripts"]
    defaults = [words[1].strip('[]"') for words in dockerfile if words[0] == "CMD"]
    assert all(each == "--help" or each in COMMANDS for each in defaults)
    users = [words[1] for words in dockerfile if words[0] == "USER"]
    assert len(users) == 2
    assert "0" not in users
    assert "root" not in users
