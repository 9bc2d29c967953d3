"""Progress where standard error is a log: lines that show life, and nothing on standard output."""

from __future__ import annotations

import io
import re
import sys
from queue import SimpleQueue

import pytest

from arborsim.report import progress
from arborsim.report.progress import LiveBar, PatientProgress, Stages, duration, progress_line


class Log(io.StringIO):
    """A stream that can be waited for: no test depends on how long a line takes."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._begun = ""

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._lines.put(line)
        return super().write(text)

    def line_with(self, words: str) -> str:
        """The next line with these words in it."""
        while words not in (line := self._lines.get(timeout=30)):
            pass
        return line


def logged(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Standard error from here on (pytest would replace what a fixture puts there)."""
    stream = Log()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "LINE_S", 0.002)
    return stream


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (80, "1:20"), (7380, "2:03:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_line_says_how_far_how_long_and_how_much_longer() -> None:
    assert progress_line("full on h100", 400, 1000, 80.0) == (
        "arborsim: 400 of 1,000 (40%), 1:20 so far, about 2:00 left: full on h100"
    )
    assert progress_line("loading", 0, None, 10.0) == "arborsim: 0:10 so far: loading"
    assert progress_line("", 0, 50, 10.0) == "arborsim: 0 of 50 (0%), 0:10 so far"
    assert "left" not in progress_line("", 50, 50, 10.0)
    # 20 of the 60 were done before: 40 in 80 s, so that 40 more take 80 s.
    assert "about 1:20 left" in progress_line("", 60, 100, 80.0, before=20)
    assert "left" not in progress_line("", 60, 100, 80.0, before=None)


def test_a_log_shows_life_even_while_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logged(monkeypatch)
    with PatientProgress(200) as bar:
        assert log.line_with("").startswith("arborsim: 0 of 200 (0%), 0:0")
        bar.advance("full on h100", 50)
        assert log.line_with("50 of 200 (25%)").endswith(" left: full on h100")
    before = log.getvalue()
    assert capsys.readouterr().out == ""
    assert log.getvalue() == before, "nothing follows the end"


def test_stages_and_live_searches_do_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logged(monkeypatch)
    with Stages() as stages:
        stages("measuring", 1, 4)
        assert log.line_with("1 of 4 (25%)").endswith(": measuring")
    with LiveBar("loading the model", time_left=True) as bar:
        log.line_with("loading the model")
        bar.show("problem 3", completed=30, total=40)
        assert " left" not in log.line_with("30 of 40 (75%)"), "they were done before"
        bar.show(completed=35)
        assert log.line_with("35 of 40 (88%)").endswith(" left: problem 3")


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with PatientProgress(2) as bar:
        bar.advance("one", 2)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


@pytest.mark.parametrize("columns", [80, 50])
def test_a_terminal_says_n_of_m_whatever_is_being_worked_on(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(Log):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    long = "12.3 cells/s, 4 failed, a-policy[0] at budget 0.25 on a-trace-with-a-long-name.parquet"
    with PatientProgress(123456) as bar:
        bar.advance(long, 120000)
    with LiveBar("loading the model", time_left=True) as live:
        live.show(long, completed=120000, total=123456)
    drawn = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))
    assert max(map(len, drawn)) <= columns
    said = [line for line in drawn if "120000 of 123456" in line and "12.3 c" in line]
    assert len(said) >= 2  # one of each
