"""What is printed: plain lines away from a terminal, nothing of a user's that could drive one."""

import io
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from simulated_runs import BASELINE

from autotune import console
from autotune.errors import WorkloadError
from autotune.study.progress import Notice, PhaseBegan, RunBegan, TrialBegan, TrialEnded, TrialMeasured
from autotune.trial.record import Interval, Outcome, Phase, TrialRecord


def record(**changes):
    """A measured search trial, with changes."""
    values = {
        "trial": 3,
        "phase": Phase.SEARCH,
        "configuration": dict(BASELINE.replace(batch_size=128)),
        "outcome": Outcome.OK,
        "started_at": "2026-11-20T10:00:00+00:00",
        "seconds": 5.0,
        "speedup": Interval(value=2.5, low=2.0, high=3.0),
    }
    return TrialRecord(**{**values, **changes})


def drawn(events, *, terminal):
    """What a run's events put on a screen, and the progress that drew them."""
    output = io.StringIO()
    screen = Console(file=output, width=100, force_terminal=terminal, highlight=False)
    progress = console.Progress(screen, clock=lambda: 0.0)
    with progress:
        for event in events:
            progress(event)
    return output.getvalue()


EVENTS = [
    RunBegan(directory=Path("results/x/1"), workload="digits", budget=180.0),
    PhaseBegan(phase=Phase.SEARCH, ends=60.0, detail="what the sampler proposes"),
    TrialBegan(trial=3, phase=Phase.SEARCH, configuration=BASELINE, changes="batch_size=128"),
    TrialMeasured(trial=3, speedup=Interval(value=2.4, low=1.9, high=2.9), pairs=3),
    TrialEnded(record=record(), changes="batch_size=128"),
    TrialEnded(
        record=record(trial=4, outcome=Outcome.OOM, speedup=None, reason="no\nmemory"),
        changes="batch_size=512",
    ),
    Notice(text="something once"),
]


def test_away_from_a_terminal_there_are_plain_lines_only():
    """No escape sequence, one line per finished trial, failures with their reason."""
    text = drawn(EVENTS, terminal=False)
    assert "\x1b" not in text
    assert re.search(r"search\s+3\s+×2.50 \(2.00 to 3.00\)\s+batch_size=128", text)
    assert re.search(r"search\s+4\s+oom\s+batch_size=512\s+\(no\)", text)
    assert "something once" in text
    assert len(text.splitlines()) == 5


def test_on_a_terminal_the_status_tells_phase_trial_speed_best_failures_and_time():
    """The status block holds all that the design promises."""
    text = drawn(EVENTS, terminal=True)
    for expected in (
        "search",
        "trial 3: batch_size=128",
        "×2.40",
        "after 3 pairs",
        "best",
        "1 oom",
        "3:00 of 3:00",
    ):
        assert expected in text


@given(st.text())
def test_no_control_character_of_a_users_text_reaches_the_terminal(text):
    """Whatever a user's string holds, what is printed is one line of printable text."""
    cleaned = console.clean(text)
    assert "\x1b" not in cleaned
    assert "\n" not in cleaned
    assert all(ord(char) >= 32 for char in cleaned)


def test_markup_in_a_users_text_is_printed_as_it_is():
    """Square brackets of a file name are not taken for colours."""
    text = drawn([Notice(text="[red]name[/red].py")], terminal=False)
    assert "[red]name[/red].py" in text


def test_an_error_shows_message_hint_and_detail_on_standard_error(capsys):
    """What is wrong, the next step, and the user's own frames, in this order."""
    console.show_error(WorkloadError("what", hint="next", detail="Traceback\n  line"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["autotune: what", "next", "Traceback", "  line"]


def test_durations_and_sizes_read_like_a_clock_and_like_a_file_manager():
    """Seconds as minutes and hours; bytes in MiB and GiB; nothing for what was not measured."""
    assert [console.duration(each) for each in (0, 65, 3700, -3)] == ["0:00", "1:05", "1:01:40", "0:00"]
    assert [console.size(each) for each in (None, 1 << 20, 3 << 29)] == ["–", "1 MiB", "1.50 GiB"]
