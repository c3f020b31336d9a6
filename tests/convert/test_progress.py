"""How progress is shown where stderr is no terminal."""

from __future__ import annotations

import pytest

from megatron_xorl.convert import progress
from megatron_xorl.convert.progress import Reporter


def test_the_plain_line_has_percent_speed_of_this_run_and_time_left() -> None:
    reporter = Reporter("import glm", 4 * 2**30, done=2**30)
    reporter.done += 2**30
    line = reporter.line(reporter._start + 8)
    # One GiB in eight seconds of this run, two GiB to go; what an earlier run did is no speed of this one.
    assert line == "import glm: 50% of 4.00 GiB, 128.0 MiB/s, 0 min 16 s left"


def test_lines_come_now_and_then_and_not_with_every_piece(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Reporter("export", 100) as reporter:
        for _ in range(100):
            clock[0] += 1
            reporter.advance(1)
    said = capsys.readouterr()
    assert said.out == ""
    assert [line[:11] for line in said.err.splitlines()] == [
        "export: 30%",
        "export: 60%",
        "export: 90%",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (2**10, "1.0 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (704e9, "655.65 GiB"),
        (2**41, "2.00 TiB"),
    ],
)
def test_a_size_is_never_shown_as_nothing(size: float, text: str) -> None:
    assert progress.shown_bytes(size) == text
