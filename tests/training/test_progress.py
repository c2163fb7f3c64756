"""The progress line, off and on a terminal."""

import io

import pytest

from llmtrain.training.progress import ProgressLine, compact, duration


def test_off_a_terminal_lines_come_every_so_often():
    now, stream = [0.0], io.StringIO()
    line = ProgressLine(100, stream=stream, plain_every=10, clock=lambda: now[0])
    for step in range(1, 26):
        now[0] += 1
        line.show(step, f"loss {step}", left=75.0 - step)
    assert stream.getvalue().splitlines() == [
        "step   1/100  loss 1  1:14 left",
        "step  11/100  loss 11  1:04 left",
        "step  21/100  loss 21  0:54 left",
    ]


def test_a_terminal_shows_one_line_that_other_text_does_not_break():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    line = ProgressLine(10, stream=stream, clock=iter(range(100)).__next__)
    line.show(1, "loss 3")
    line.write("a sample")
    line.show(2, "loss 2")
    line.close()
    shown = stream.getvalue()
    assert "a sample\n" in shown
    assert shown.rstrip().split("\r")[-1].startswith("step  2/10  loss 2")
    assert shown.endswith("\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3723, "1:02:03"), (90_000, "1d 01:00"), (-1, "0:00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(950, "950"), (31_240, "31.2k"), (1_540_000, "1.54M"), (2.5e9, "2.50G")])
def test_compact_numbers(number, text):
    assert compact(number) == text
