"""The codec of records and their log: what is read, refused by name, and written."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from arborsim.core.documents import RecordLog, plain, strict, to_json, to_toml
from arborsim.core.errors import UsageError
from arborsim.core.records import (
    Duration,
    Seed,
    Text,
    Whole,
    check_ranges,
    convert,
    from_toml,
    given_values,
    parsed,
    read_toml,
)
from arborsim.core.tiers import Budget

Share = Annotated[float, Meta(gt=0, le=1)]


def _budget(value: object) -> Budget:
    return Budget.parse(str(value))


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Seconds:
    base_s: Annotated[float, Meta(ge=0)] = 0.0
    token_s: Annotated[float, Meta(ge=0)] = 0.0


@dataclass(frozen=True)
class Entry:
    name: Text
    weight: Annotated[float, Meta(gt=0)] = 1.0

    def __post_init__(self) -> None:
        if self.name == "none":
            raise UsageError("it must have another name")


@dataclass(frozen=True)
class Thing:
    name: Text
    size: Whole = 1
    share: Share = 0.5
    count: Annotated[int, Meta(ge=1, le=100)] = 1
    wait: Duration | None = None
    how: Literal["stage", "stream"] = "stage"
    colour: Colour = Colour.RED
    both: bool | str = True
    curve: tuple[float, ...] = ()
    names: Annotated[tuple[Text, ...], Meta(min_length=1)] = ("a",)
    price: tuple[float, float] | float | None = None
    budget: Annotated[Budget, parsed(_budget)] | None = None
    seed: Seed = 0
    policies: Mapping[str, Seconds] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    anything: Mapping[str, Any] = field(default_factory=dict)
    mix: tuple[Entry, ...] = ()


def read(text: str) -> Thing:
    return from_toml(Thing, text, "t.toml")


def test_a_record_is_read_down_to_its_tables() -> None:
    found = read("""
        name = " x "
        size = 80e9
        wait = "50 ms"
        how = "stream"
        colour = "blue"
        curve = [1, 0.5]
        price = [1, 2.5]
        budget = 0.25
        policies.h2o.base_s = 1
        sources.share = "measured"
        anything.deep = [1, { a = nan }]
        [[mix]]
        name = "one"
        [[mix]]
        name = "two"
        weight = 3
    """)
    assert (found.name, found.size, found.wait) == ("x", 80 * 10**9, 0.05)
    assert (found.how, found.colour, found.curve) == ("stream", Colour.BLUE, (1.0, 0.5))
    assert (found.price, found.budget) == ((1.0, 2.5), Budget.parse("0.25"))
    assert type(found.curve[0]) is float
    assert found.policies == {"h2o": Seconds(1.0)}
    assert found.mix == (Entry("one"), Entry("two", 3.0))
    assert read('name = "x"') == Thing("x")


WRONG = {
    "x": "t.toml is not valid TOML: ",
    "": "t.toml: name is missing",
    "naem = 'x'": "t.toml: unknown key or table 'naem': did you mean name",
    "name = ' '": "t.toml: name must be a text, not ' '",
    "name = 3": "t.toml: name must be a text, not 3",
    "name = 'x'\nshare = 0": "t.toml: share must be above 0, not 0",
    "name = 'x'\nshare = 2.5": "t.toml: share must be at most 1, not 2.5",
    "name = 'x'\nshare = nan": "t.toml: share must be a finite number, not nan",
    "name = 'x'\nshare = '1'": "t.toml: share must be a number, not '1'",
    "name = 'x'\nshare = true": "t.toml: share must be a number, not True",
    "name = 'x'\nshare = 1" + 400 * "0": "t.toml: share must be a finite number, not 1000",
    "name = 'x'\ncount = 1.0": "t.toml: count must be a whole number, not 1.0",
    "name = 'x'\ncount = 0": "t.toml: count must be at least 1, not 0",
    "name = 'x'\nsize = 1e30": "t.toml: size must be a whole number of 64 bits, not 1000",
    "name = 'x'\nsize = 1.5": "t.toml: size must be a whole number, not 1.5",
    "name = 'x'\nsize = inf": "t.toml: size must be a whole number, not inf",
    "name = 'x'\nwait = 60": 't.toml: wait must be a time with its unit, such as "60 s" or',
    "name = 'x'\nwait = '0 s'": "t.toml: wait must be above 0 and finite, not '0 s'",
    "name = 'x'\nhow = 'strea'": "t.toml: how: unknown how 'strea': did you mean stream",
    "name = 'x'\ncolour = 1": "t.toml: colour must be one of red, blue, not 1",
    "name = 'x'\nboth = 1": "t.toml: both must be true or false or a text, not 1",
    "name = 'x'\ncurve = 1": "t.toml: curve must be a list of numbers, not 1",
    "name = 'x'\ncurve = [1, 'a']": "t.toml: curve item 2 must be a number, not 'a'",
    "name = 'x'\nnames = []": "t.toml: names is empty: name at least one",
    "name = 'x'\nprice = [1]": "t.toml: price must be a list of 2 values, not [1]",
    "name = 'x'\nbudget = -1": "t.toml: budget: budget '-1' must be above 0",
    "name = 'x'\npolicies = 3": "t.toml: [policies] must be a table, not 3",
    "name = 'x'\npolicies.a.bas_s = 3": "t.toml: unknown key of [policies.a] 'bas_s': did you mean",
    "name = 'x'\npolicies.a.base_s = -3": "t.toml: [policies.a] base_s must be at least 0, not -3",
    "name = 'x'\nsources.a = 3": "t.toml: [sources] a must be a text, not 3",
    "name = 'x'\nmix = 3": "t.toml: [[mix]] must be a list of tables, not 3",
    "name = 'x'\n[[mix]]\nweight = 0": "t.toml: [[mix]] 1 weight must be above 0, not 0",
    "name = 'x'\n[[mix]]\nname = 'none'": "t.toml: [[mix]] 1: it must have another name",
    "name = 'x'\n\"a\\nb\" = 1": "t.toml: unknown key or table 'a b'",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert WRONG[text] in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.dictionaries(st.sampled_from(sorted(Thing.__annotations__)), st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
)))  # fmt: skip
def test_any_value_is_a_record_or_one_clear_line(values: dict[str, Any]) -> None:
    try:
        convert(Thing, values, "[thing]")
    except UsageError as error:
        assert "[thing" in str(error)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read \(No such file"):
        read_toml(Thing, tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        read_toml(Thing, tmp_path / "latin.toml")
    (tmp_path / "good.toml").write_text(to_toml(Thing("x")))
    assert read_toml(Thing, tmp_path / "good.toml") == Thing("x")


def test_part_of_a_record_and_ranges_of_one_made_in_python() -> None:
    assert given_values(Thing, {"count": 3}) == {"count": 3}
    check_ranges(Thing("x"), "thing")
    with pytest.raises(UsageError, match="thing: share must be at most 1, not 3"):
        check_ranges(Thing("x", share=3), "thing")
    with pytest.raises(UsageError, match="share must be above 0 and at most 1, not nan"):
        check_ranges(Thing("x", share=math.nan), "thing")


def test_what_is_written_is_read() -> None:
    one = Thing(
        "x", 7, wait=None, price=(1.0, 2.0), policies={"a b": Seconds(0.1)},
        anything={"n": np.float64(1.5), "list": np.arange(2), "deep": {"t": True, "s": 'a"\x7f'}},
    )  # fmt: skip
    text = to_toml(one)
    raw = tomllib.loads(text)
    assert raw["anything"] == {"n": 1.5, "list": [0, 1], "deep": {"t": True, "s": 'a"\x7f'}}
    assert raw["policies"] == {"a b": {"base_s": 0.1, "token_s": 0.0}}
    assert "wait" not in raw
    assert to_toml(one) == text
    assert to_toml({"x": [{"a": 1}, {"b": {"c": 2}}]}) == "[[x]]\na = 1\n\n[[x]]\n\n[x.b]\nc = 2\n"
    with pytest.raises(TypeError, match="no place in TOML"):
        to_toml({"x": [None]})


def test_json_is_strict_and_the_same_each_time() -> None:
    value = {"b": np.float32(0.5), 1: [math.nan, math.inf, (1, Colour.RED)], "z": Seconds()}
    assert strict(value) == {
        "b": 0.5, "1": [None, None, [1, "red"]], "z": {"base_s": 0.0, "token_s": 0.0},
    }  # fmt: skip
    assert to_json(value, None) == json.dumps(strict(value), sort_keys=True)
    assert math.isnan(plain(value)["1"][0])


def log(path: Path, version: int = 1) -> RecordLog[Entry]:
    return RecordLog(path, Entry, "things", version)


def test_a_log_goes_on_behind_what_it_holds(tmp_path: Path) -> None:
    first = log(tmp_path / "log")
    first.open({"request": 3})
    first.add(Entry("a", math.nan))
    first.add({"name": "b"})
    first.close()
    whole = first.path.read_bytes()
    for cut in (1, 8, len(whole) - 5, len(whole) - 40):
        first.path.write_bytes(whole[:-cut])
        again = log(first.path)
        head = again.read()
        assert head in ({}, {"format": "things", "version": 1, "request": 3})
        assert [each.name for each in again.records] == ["a", "b"][: len(again.records)]
        again.open({"request": 3})
        for name in ["a", "b"][len(again.records) :]:
            again.add(Entry("a", math.nan) if name == "a" else {"name": "b"})
        again.close()
        assert first.path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "notes", "not a log of format things, version 1"),
        (lambda text: '{"a": 1}\n', "not a log of format things"),
        (lambda text: text.replace('"version":1', '"version":0'), "not a log"),
        (lambda text: text + "{\n", "line 3: no JSON: the log is damaged; delete the line"),
        (lambda text: text + "[]\n", "line 3: must be a table, not []: the log is damaged"),
        (lambda text: text + "{}\n", "line 3: name is missing"),
    ],
)
def test_what_is_no_log_is_left_alone(tmp_path: Path, change: Any, said: str) -> None:
    made = log(tmp_path / "log")
    made.open({})
    made.add(Entry("a"))
    made.close()
    made.path.write_text(change(made.path.read_text()))
    before = made.path.read_bytes()
    with pytest.raises(UsageError, match="log") as caught:
        log(made.path).read()
    assert said in str(caught.value)
    assert made.path.read_bytes() == before
    with pytest.raises(UsageError, match="cannot be read"):
        log(tmp_path / "none").read()
    with pytest.raises(UsageError, match="cannot write"):
        log(tmp_path / "no" / "log").open({})
