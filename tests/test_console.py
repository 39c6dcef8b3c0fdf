"""What is printed: plain lines away from a terminal, nothing of a user's that could drive one."""

import dataclasses
import io
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from simulated_runs import BASELINE
from test_recommendation import COMPILED, NO_GAIN, OVER_PLAIN, REFERENCE, SLOWER, UNSURE, confirmed, recipe_of

from autotune import console
from autotune.errors import WorkloadError
from autotune.history.frame import COLUMNS
from autotune.measure.deciding import Shortfall
from autotune.recipe.recipe import Estimate
from autotune.study.confirmed import Plain
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


def test_a_resumed_runs_moments_count_from_its_beginning():
    """When a phase ends is told in the run's seconds, and so is when it began."""
    resumed = RunBegan(directory=Path("results/x/1"), workload="digits", budget=180.0, spent=40.0)
    lines = drawn([resumed, *EVENTS[1:2]], terminal=False).splitlines()
    assert lines[1].strip() == "0:40  search: what the sampler proposes, until 1:00"


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


def test_the_best_is_what_leads_by_the_latest_looks():
    """A second look that lowers the leader gives the place to the next; one that fails leaves it out."""

    def ended(trial, speedup, **fields):
        interval = speedup and Interval(value=speedup, low=speedup - 1, high=speedup + 1)
        ended = record(trial=trial, speedup=interval, **fields)
        return TrialEnded(record=ended, changes=f"batch_size={trial}")

    lines = drawn(
        [*EVENTS[:2], ended(64, 4.75), ended(128, 4.63), ended(64, 3.72)], terminal=True
    ).splitlines()
    assert re.search(r"best +×4.63 +batch_size=128", [each for each in lines if "best" in each][-1])
    failed = ended(128, None, outcome=Outcome.OOM)
    lines = drawn([*EVENTS[:2], ended(128, 4.63), ended(64, 3.72), failed], terminal=True).splitlines()
    assert re.search(r"best +×3.72 +batch_size=64", [each for each in lines if "best" in each][-1])


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


def test_a_trial_that_never_settled_says_so():
    """In a run's trials by a remark, only on what was measured; settled ones, and older records, say nothing."""
    text = {
        settled: console.trial_line(record(settled=settled), "batch_size=128", stamp="0:05").plain
        for settled in (True, False, None)
    }
    assert "was still getting faster when it was measured" in text[False]
    assert text[True] == text[None]
    assert text[False].startswith(text[True])
    failed = record(settled=False, outcome=Outcome.UNSTABLE, reason="loss scale")
    assert "still getting faster" not in console.trial_line(failed, "", stamp="").plain


@pytest.mark.parametrize(("settled", "shown"), [((True, False), True), ((True, None), False)])
def test_a_history_has_the_settled_column_where_it_says_something(settled, shown):
    """One trial that did not settle brings the column; unknown is not "no"."""
    frame = pd.DataFrame(
        {
            name: pd.Series(settled if name == "settled" else [pd.NA] * 2, dtype=dtype)
            for name, dtype in COLUMNS.items()
        }
    )
    output = io.StringIO()
    console.show_history(frame, Console(file=output, width=200))
    assert ("settled" in output.getvalue().splitlines()[0].split()) == shown


# -------------------------------------------------------------------------------------------------- recipes


def shown(recipe):
    """What `autotune tune` ends with, as plain text."""
    output = io.StringIO()
    screen = Console(file=output, width=200, force_terminal=False, highlight=False)
    console.show_recipe(recipe, Path("recipe.json"), screen)
    console.show_usage(recipe, Path("recipe.json"), screen)
    return output.getvalue()


@pytest.mark.parametrize(("onednn", "before"), [(True, "the first tensor"), (False, "import tensorflow")])
def test_training_code_is_told_what_apply_must_precede(monkeypatch, onednn, before):
    """An environment variable that TensorFlow reads while it is imported is set before that."""
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    text = shown(recipe_of(confirmed(BASELINE.replace(onednn=onednn, batch_size=128))))
    assert re.search(rf"recipe\.apply\(\) +# before {before}", text)


def test_what_had_no_time_is_called_unconfirmed():
    """Not "no gain": what looked faster, that this is no claim, and the budget to run again with."""
    looked = Interval(value=2.4, low=2.2, high=2.6)
    finalist = dataclasses.replace(confirmed(speedup=None, verdict=NO_GAIN), in_search=looked)
    text = shown(recipe_of(finalist, sufficient_budget=130.0))
    assert (
        "Not confirmed: batch_size=128 jit_compile=true looked ×2.40 in the search (not a claim), but" in text
    )
    assert "Run again with --budget 130s." in text
    assert "No significant gain" not in text


def test_what_was_measured_and_is_not_faster_is_no_gain():
    """The closest candidate is shown with its interval and the rule it failed."""
    text = shown(recipe_of(dataclasses.replace(confirmed(verdict=NO_GAIN), ratio=UNSURE)))
    assert "No significant gain: keep what you have." in text
    assert "Closest: batch_size=128 jit_compile=true: ×1.05 (0.99 to 1.12); its interval" in text
    assert "Not confirmed" not in text
    assert "--budget" not in text


def test_nothing_to_confirm_is_said_so():
    """No candidate that looked faster, or none that could be measured: each in its own words."""
    slower = REFERENCE.model_copy(update={"trial": 1, "speedup": Interval(value=0.8, low=0.7, high=0.9)})
    assert "nothing that was tried looked faster" in shown(recipe_of(result=False, searched=[slower]))
    assert "no other configuration could be measured" in shown(recipe_of(result=False))


def test_a_confirmation_that_was_stopped_is_not_a_matter_of_the_budget():
    """Who pressed Ctrl-C hears that, and no budget."""
    finalist = confirmed(speedup=None, verdict=NO_GAIN)
    text = shown(recipe_of(finalist, cut_short=Shortfall.INTERRUPTED, sufficient_budget=130.0))
    assert "Not confirmed" in text
    assert "stopped" in text
    assert "--budget" not in text


def test_the_baseline_as_recommendation_has_no_interval_and_no_usage():
    """Its speed-up over itself is ×1; nothing needs to change in the training code, so no line is given for it."""
    text = shown(recipe_of(confirmed(verdict=NO_GAIN)))
    (line,) = (each for each in text.splitlines() if "speed-up" in each)
    assert line.split() == ["speed-up", "×1", "×1"]
    assert "nothing needs to change in your training code" in text
    assert "Recipe.load" not in text


def test_a_gain_comes_with_the_lines_for_the_training_code():
    """The verdict with its interval, then how to use the recipe."""
    text = shown(recipe_of(confirmed()))
    assert "Faster: ×" in text
    assert "Recipe.load" in text
    assert "jit_compile" in text


def test_a_second_baseline_is_shown_where_it_is_another():
    """Float32 without XLA has a line of its own where the baseline is not that; else there is none."""
    assert "lain float32" not in shown(recipe_of(confirmed()))
    winner = dataclasses.replace(confirmed(), over_plain=OVER_PLAIN)
    told = shown(recipe_of(winner, baseline=COMPILED, plain=SLOWER))
    assert (
        "Plain float32 without XLA: 3,000 (2,900 to 3,100) samples/s; the baseline is ×1.35 (1.22 to 1.49)"
        in told
    )
    assert "of that, the recommendation ×2.23 (2.01 to 2.46)." in told
    kept = shown(recipe_of(confirmed(verdict=NO_GAIN), baseline=COMPILED, plain=SLOWER))
    assert "the baseline is ×1.35 (1.22 to 1.49) of that." in kept
    left_out = shown(recipe_of(confirmed(), baseline=COMPILED, plain=Plain(left_out="no room")))
    assert "not plain float32 without XLA, and that was not measured: no room." in left_out


def test_a_rate_from_one_slice_has_no_interval():
    """One slice has no spread: its rate stands alone, not between two bounds that equal it."""
    one = Interval(value=4000.0, low=4000.0, high=4000.0)
    text = shown(recipe_of(result=False, baseline_rate=one))
    (line,) = (each for each in text.splitlines() if "samples/s" in each)
    assert line.split() == ["samples/s", "4,000", "4,000"]


def test_bounds_that_are_the_figure_itself_are_not_shown():
    """An interval of no width would look like certainty."""
    assert console.estimated_ratio(Estimate(value=1.5, ci95=(1.5, 1.5))) == "×1.50"
    assert console.estimated_ratio(Estimate(value=1.5, ci95=(1.4, 1.6))) == "×1.50 (1.40 to 1.60)"
