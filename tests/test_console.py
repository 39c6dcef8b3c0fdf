"""What is printed: plain lines away from a terminal, nothing of a user's that could drive one."""

import io
import math
import re
import shlex
import threading
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console
from simulated_runs import BASELINE, a_pair, a_record

import autotune
from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptFacts, Trains
from autotune.data.figures import Check, Interval
from autotune.data.printable import duration, memory_size
from autotune.data.record import InterimAnalysis, Outcome, Phase, Standing
from autotune.data.run_directory import RunDirectory
from autotune.front import cli
from autotune.front.console import Progress, ratio, show_error, trial_line
from autotune.front.results import MOST_LINES, show_answer, show_history
from autotune.recipe.advice import answer_at
from autotune.recipe.evidence import Contribution, Watch
from autotune.report.history import columns
from autotune.stats.deciding import EndedBy, Verdict
from autotune.tuning.events import (
    Began,
    Notice,
    PairMeasured,
    RunBegan,
    StepsBegan,
    TrialBegan,
    TrialEnded,
    TrialMeasured,
)


def record(**changes):
    """A measured search trial, with changes."""
    usual = {"trial": 3, "speedup": Interval(value=2.5, low=2.0, high=3.0)}
    return a_record(BASELINE.replace(batch_size=128), **{**usual, **changes})


def drawn(events, *, terminal):
    """What a run's events put on a screen, and the progress that drew them."""
    output = io.StringIO()
    screen = Console(file=output, width=100, force_terminal=terminal, highlight=False)
    progress = Progress(screen, clock=lambda: 0.0)
    with progress:
        for event in events:
            progress(event)
    return output.getvalue()


def test_each_pair_of_a_confirmation_is_told():
    speedup = Interval(value=2.33, low=2.1, high=2.6)
    pairs = [PairMeasured(trial=14, processes=1, speedup=None), PairMeasured(trial=14, processes=2, speedup=speedup)]
    first, second = drawn(pairs, terminal=False).splitlines()
    assert first.endswith("confirm   14  1 process a side")
    assert second.endswith("confirm   14  2 processes a side: ×2.33 (2.10 to 2.60)")


def test_after_fifteen_seconds_of_silence_what_goes_on_is_told():
    output, times = io.StringIO(), [0.0]
    progress = Progress(Console(file=output, width=100), clock=lambda: times[-1])
    progress(Began(text="importing the workload"))
    before = output.getvalue()
    for now in (14.0, 16.0, 17.0):
        times.append(now)
        progress.break_silence()
    assert output.getvalue().removeprefix(before).splitlines() == [" 0:16  … importing the workload, for 16 s"]


def test_what_has_no_line_of_its_own_is_told_after_a_silence():
    output, times = io.StringIO(), [0.0]
    progress = Progress(Console(file=output, width=100), clock=lambda: times[-1])
    progress(Began(text="looking at the script: call 2 of fit()", shown=False))
    assert output.getvalue() == ""
    times.append(20.0)
    progress.break_silence()
    assert "… looking at the script: call 2 of fit(), for 20 s" in output.getvalue()


def test_a_slow_first_step_is_told_from_a_slow_start():
    output, times = io.StringIO(), [0.0]
    progress = Progress(Console(file=output, width=100), clock=lambda: times[-1])
    progress(EVENTS[2])
    for now in (20.0, 44.0):
        times.append(now)
        progress.break_silence()
        progress(StepsBegan())
    assert [line.split("… ")[1] for line in output.getvalue().splitlines()] == [
        "trial 3: batch_size=128, starting, for 20 s",
        "trial 3: batch_size=128, in its first steps, for 24 s",
    ]


def test_the_best_is_told_by_its_fresh_processes():
    looks = InterimAnalysis(leader=1, candidate=3, error=0.05, most=12, reference=5)
    fresh = record(trial=6, phase=Phase.CONFIRM, looks=(looks,), speedup=Interval(value=1.1, low=0.9, high=1.3))
    ended = [TrialEnded(record=known, changes="batch_size=128") for known in (record(), fresh)]
    best = re.findall(r"best so far\s+×([\d.]+)", drawn(ended, terminal=True))
    assert (best[0], best[-1]) == ("2.50", "1.10")


def test_the_silence_is_watched_while_a_run_goes_on():
    told = threading.Event()
    progress = Progress(Console(file=io.StringIO()))
    progress.break_silence = told.set
    with progress:
        assert told.wait(60.0)


EVENTS = [
    RunBegan(directory=Path("results/x/1"), workload="digits", budget=180.0),
    Began(text="importing the workload"),
    TrialBegan(trial=3, phase=Phase.SEARCH, configuration=BASELINE, changes="batch_size=128"),
    TrialMeasured(trial=3, speedup=Interval(value=2.4, low=1.9, high=2.9), pairs=3),
    TrialEnded(record=record(), changes="batch_size=128"),
    TrialEnded(
        record=record(trial=4, outcome=Outcome.OOM, speedup=None, reason="no\nmemory"), changes="batch_size=512"
    ),
    Notice(text="something once"),
]


def test_away_from_a_terminal_there_are_plain_lines_only():
    text = drawn(EVENTS, terminal=False)
    assert "\x1b" not in text
    assert re.search(r"search\s+3\s+×2.50\s+batch_size=128", text)
    assert re.search(r"search\s+4\s+oom\s+batch_size=512\s+\(no\)", text)
    assert "something once" in text
    assert len(text.splitlines()) == 5


def test_a_resumed_runs_moments_count_from_its_beginning():
    resumed = RunBegan(directory=Path("results/x/1"), workload="digits", budget=180.0, spent=40.0)
    lines = drawn([resumed, *EVENTS[1:2]], terminal=False).splitlines()
    assert lines[1].strip() == "0:40  importing the workload"


@pytest.mark.parametrize(
    ("low", "high", "uncertain"), [(2.0, 3.0, False), (1.7, 3.4, True), (1.8, 3.5, False), (0.0, 3.0, True)]
)
def test_a_vague_speed_up_is_marked(low, high, uncertain):
    measured = record(speedup=Interval(value=2.5, low=low, high=high))
    text = trial_line(measured, "batch_size=128", stamp="0:05").plain
    assert "×2.50" in text
    assert ("(noisy)" in text) is uncertain
    assert f"{low:.2f} to" not in text


@pytest.mark.parametrize(
    ("standing", "told"),
    [
        (Standing.CONFIRMED, "confirmed in 3 fresh processes a side"),
        (Standing.NOT_SHOWN, "no gain shown after 3 fresh processes a side"),
        (Standing.OPEN, "not decided after 3 fresh processes a side"),
        (Standing.OUT_OF_TIME, "not decided after 3 fresh processes a side"),
    ],
)
def test_a_leaders_line_says_how_its_confirmation_stands(standing, told):
    looks = InterimAnalysis(leader=1, candidate=1, error=0.025, most=12, standing=standing, reference=2)
    pairs = tuple(a_pair(2.5, instance=instance) for instance in (0, 0, 1, 2))
    leader = record(phase=Phase.CONFIRM, looks=(looks,), pairs=pairs)
    assert f"({told})" in trial_line(leader, "batch_size=128", stamp="0:05").plain
    failed = leader.model_copy(update={"outcome": Outcome.UNSTABLE, "reason": "retracing: too often"})
    line = trial_line(failed, "batch_size=128", stamp="0:05").plain
    assert "unstable" in line
    assert line.endswith("(retracing: too often)")
    assert "fresh processes" not in line


def test_status_shows_trial_speed_best_failures_and_time():
    text = drawn(EVENTS, terminal=True)
    for expected in ("search", "trial 3: batch_size=128", "×2.40", "after 3 pairs", "best", "1 oom", "3:00 of 3:00"):
        assert expected in text


def test_the_best_is_what_leads_by_the_latest_looks():

    def ended(trial, speedup, **fields):
        interval = speedup and Interval(value=speedup, low=speedup - 1, high=speedup + 1)
        ended = record(trial=trial, speedup=interval, **fields)
        return TrialEnded(record=ended, changes=f"batch_size={trial}")

    lines = drawn([*EVENTS[:2], ended(64, 4.75), ended(128, 4.63), ended(64, 3.72)], terminal=True).splitlines()
    assert re.search(r"best so far +×4.63 +batch_size=128", [line for line in lines if "best" in line][-1])
    failed = ended(128, None, outcome=Outcome.OOM)
    lines = drawn([*EVENTS[:2], ended(128, 4.63), ended(64, 3.72), failed], terminal=True).splitlines()
    assert re.search(r"best so far +×3.72 +batch_size=64", [line for line in lines if "best" in line][-1])


def test_a_failed_baselines_reason_is_told_once(capsys):
    failed = record(trial=0, phase=Phase.BASELINE, outcome=Outcome.ERROR, reason="KeyError: 'age'")
    said = drawn([TrialEnded(record=failed, changes="baseline")], terminal=False)
    detail = "Traceback (your code):\n  line 1\n    KeyError: 'age'\nKeyError: 'age'"
    show_error(WorkloadError("dataset() raised KeyError: 'age'", detail=detail))
    said += capsys.readouterr().err
    assert said.splitlines()[-4:] == [
        "autotune: dataset() raised KeyError: 'age'",
        "Traceback (your code):",
        "  line 1",
        "    KeyError: 'age'",
    ]
    assert said.count("KeyError") == 2


def test_durations_and_sizes_are_formatted_for_people():
    assert [duration(each) for each in (0, 65, 3700, -3)] == ["0:00", "1:05", "1:01:40", "0:00"]
    assert [memory_size(each) for each in (None, 1 << 20, 3 << 29)] == ["–", "1 MiB", "1.50 GiB"]


def test_a_trial_that_never_settled_says_so():
    text = {
        settled: trial_line(record(settled=settled), "batch_size=128", stamp="0:05").plain
        for settled in (True, False, None)
    }
    assert "had not reached a steady speed" in text[False]
    assert text[True] == text[None]
    assert text[False].startswith(text[True])
    failed = record(settled=False, outcome=Outcome.UNSTABLE, reason="loss scale")
    assert "steady speed" not in trial_line(failed, "", stamp="").plain


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("settled", (True, False), True),
        ("settled", (True, None), False),
        ("same_loss_speedup", (None, 2.5), True),
        ("same_loss_speedup", (None, None), False),
    ],
)
def test_a_history_says_more_where_there_is_more(name, values, shown):
    frame = pd.DataFrame(
        {
            column: pd.Series(values if column == name else [pd.NA] * 2, dtype=dtype)
            for column, dtype in columns().items()
        }
    )
    output = io.StringIO()
    show_history(frame.assign(outcome="ok"), Console(file=output, width=200))
    assert ({"settled": "settled", "same_loss_speedup": "same losses ×2.50"}[name] in output.getvalue()) == shown


# -------------------------------------------------------------------------------------------------- recipes


def shown(recipe, path=Path("recipe.json"), tuned="train.py", **evidence):
    """What `autotune tune` ends with, as plain text on whole lines; with changes to the recipe's evidence."""
    recipe = recipe.model_copy(update={"evidence": recipe.evidence.model_copy(update=evidence)})
    output = io.StringIO()
    screen = Console(file=output, width=200, force_terminal=False, highlight=False)
    show_answer(answer_at(recipe, path, tuned), path, screen)
    lines = output.getvalue().splitlines()
    assert len(lines) <= 1 + MOST_LINES
    return output.getvalue()


def unfolded(text):
    """A text whose folded lines are whole again."""
    return " ".join(text.replace(" \\\n", "\n").split())


def test_gain_is_shown_with_its_interval_and_code_lines(recipes):
    recipe = recipes[Verdict.FASTER]
    text = shown(recipe)
    assert text.index("Faster: ×") < text.index("now") < text.index("batch_size  ") < text.index("samples/s  ")
    assert text.index("samples/s  ") < text.index("Not checked:") < text.index("In your training code:")
    assert re.search(r"batch_size +32 +128", text)
    low, high = recipe.evidence.speedup.low, recipe.evidence.speedup.high
    assert f"Faster: ×{recipe.evidence.speedup.value:.2f} ({low:.2f} to {high:.2f}) in samples/s\n" in text
    processes = recipe.evidence.confirmation.processes
    assert f"confirmed in {processes} fresh processes a side, 95% intervals." in unfolded(text)
    assert "Recipe.load" in text
    assert "recipe.fit(model, dataset" in text
    assert "--resume" not in text
    assert [line for line in text.splitlines() if line.endswith(" ")] == []


def test_what_a_change_gives_is_told(recipes):
    gain = Contribution(knob="batch_size", gain=Interval(value=1.4, low=1.2, high=1.6), trial=9)
    assert "128 (gives ×1.40)" in unfolded(shown(recipes[Verdict.FASTER], contributions=(gain,)))


@pytest.mark.parametrize(("seconds", "told"), [((0.0, 0.9), False), ((None, None), False), ((0.0, 2.5), True)])
def test_a_training_that_compiles_nothing_has_no_compile_time(recipes, seconds, told):
    before, after = seconds
    text = shown(recipes[Verdict.FASTER], baseline_compile_seconds=before, compile_seconds=after)
    assert ("compile time" in text) is told


def test_no_gain_says_what_is_excluded_and_to_keep_what_there_is(recipes):
    recipe = recipes[Verdict.NO_SIGNIFICANT_GAIN]
    text = unfolded(shown(recipe, excluded_gain=0.061, ended_by=EndedBy.SETTLED, candidates=7))
    assert "No significant gain: nothing tried can be more than 7% faster (7 candidates tried). Keep your" in text
    exhausted = "nothing tried can be more than 10% faster (1 candidate tried, the search space is exhausted)"
    assert exhausted in unfolded(shown(recipe, excluded_gain=0.1, ended_by=EndedBy.EXHAUSTED))
    assert "no candidate could be measured (1 candidate tried" in unfolded(shown(recipe, excluded_gain=None))
    assert "Best so far" not in text
    assert "vary too much to exclude a gain" in unfolded(shown(recipe, excluded_gain=6.7e14))
    assert "Training code that trains like it needs no change." in text
    assert "NumPy arrays passed to fit, or a tf.distribute strategy" in text
    for absent in ("recommended", "Recipe.load", "--resume"):
        assert absent not in text


@pytest.mark.parametrize(
    ("ended_by", "why"), [(EndedBy.BUDGET, "the budget ended"), (EndedBy.INTERRUPTED, "the run was stopped")]
)
@pytest.mark.parametrize("name", ["run", "my run's $HOME; rm -r x"])
def test_undecided_ends_with_the_very_command_that_goes_on(recipes, ended_by, why, name):
    recipe = recipes[Verdict.UNDECIDED]
    spent = recipe.created_by.model_copy(update={"spent_seconds": recipe.created_by.budget_seconds})
    recipe = recipe.model_copy(update={"created_by": spent})
    printed = shown(recipe, Path("results") / name / "recipe.json", tuned="my train.py:it", ended_by=ended_by)
    text = unfolded(printed)
    assert f"Undecided: {why} before the answer was settled (1 candidate tried)." in text
    least = math.ceil(100 * recipe.evidence.smallest_gain_shown)
    assert f"Only gains of {least}% or more could have been shown." in text
    looked = recipe.candidate.speedup.value
    assert f"Best so far: batch_size=128: ×{looked:.2f} (search only); the run ended before" in text
    assert '.load("' in printed.splitlines()[-1]
    assert ").with_candidate().apply()    # before" in printed.splitlines()[-1]
    (going_on,) = re.findall(r"^Go on: (.*)$", printed.replace(" \\\n", ""), re.MULTILINE)
    words = shlex.split(going_on)
    assert words[:3] == ["autotune", "tune", "my train.py:it"]
    assert words[3:6] == ["--resume", f"results/{name}", "--budget"]
    assert words[6] == f"{recipe.evidence.go_on_seconds:.0f}s"
    cli.app.parse_args(words[1:])


@pytest.mark.parametrize(
    "changes",
    [
        {"speedup": Interval(value=0.9, low=0.9, high=0.9)},
        {"speedup": Interval(value=1.5, low=1.5, high=1.5), "reason": "it failed a stability check: retracing: 3"},
    ],
)
def test_slower_or_unstable_candidate_is_not_offered(recipes, changes):
    recipe = recipes[Verdict.UNDECIDED]
    recipe = recipe.model_copy(update={"candidate": recipe.candidate.model_copy(update=changes)})
    text = shown(recipe, ended_by=EndedBy.BUDGET)
    assert "Best so far: batch_size=128: ×" in text
    assert "with_candidate" not in text


def test_a_run_with_time_left_does_not_say_that_the_budget_ended(recipes):
    recipe = recipes[Verdict.UNDECIDED]
    times = recipe.created_by.model_copy(update={"budget_seconds": 120.0, "spent_seconds": 83.0})
    text = shown(recipe.model_copy(update={"created_by": times}), ended_by=EndedBy.BUDGET)
    assert "Undecided: the remaining 37 s were too short for another trial" in unfolded(text)


def test_unstable_names_the_rule(recipes):
    text = unfolded(shown(recipes[Verdict.UNSTABLE]))
    assert "Unstable: every faster candidate failed a stability check (1 candidate tried)." in text
    assert re.search(r"Best so far: batch_size=128: ×1\.\d\d .*it failed a stability check: retracing: ", text)
    assert "Keep your current settings" in text
    assert "--resume" not in text


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize(
    ("workload", "knobs", "expected"),
    [
        ({}, {}, "model.fit on dataset().batch(32) on one device, jit_compile=false."),
        ({}, {"jit_compile": "auto"}, "dataset().batch(32) on one device, all else by default."),
        (
            {"drop_remainder": True},
            {"prefetch": 7},
            "dataset().batch(32, drop_remainder=True) on one device, jit_compile=false, prefetch=7.",
        ),
        ({"batched": True}, {}, "dataset(config), batches of 32, on one device, jit_compile=false."),
    ],
)
def test_what_the_baseline_is_is_said(recipes, verdict, workload, knobs, expected):
    recipe = recipes[verdict]
    baseline = {**recipe.baseline, **knobs}
    changed = recipe.model_copy(update={"baseline": baseline, "workload": recipe.workload.model_copy(update=workload)})
    assert expected.removesuffix(".") in unfolded(shown(changed)).partition("Baseline: ")[2]


def test_a_closing_table_breaks_no_word_in_a_narrow_terminal(recipes):
    output = io.StringIO()
    screen = Console(file=output, width=40, force_terminal=True, color_system=None)
    show_answer(recipes[Verdict.FASTER].answer, Path("recipe.json"), screen)
    words = set(unfolded(output.getvalue()).split())
    assert {"batch_size", "recommended", "samples/s", "Baseline:"} <= words


@pytest.mark.parametrize(("onednn", "before"), [(True, "the first tensor"), (False, "import tensorflow")])
def test_training_code_is_told_what_apply_must_precede(recipes, monkeypatch, onednn, before):
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    recipe = recipes[Verdict.FASTER]
    other = recipe.model_copy(update={"configuration": {**recipe.configuration, "onednn": onednn}})
    assert re.search(rf"\.apply\(\) +# before {before}", shown(other))


def test_what_was_not_checked_is_listed(recipes):
    recipe = recipes[Verdict.FASTER]
    (line,) = [line for line in shown(recipe).splitlines() if line.startswith("Not checked: ")]
    gaps = recipe.evidence.stability.not_checked
    named = line.removeprefix("Not checked: ").split("; ")
    assert named[0].rstrip("…") in gaps[0]
    assert named[1:] == [f"{len(gaps) - 1} more on the page"]
    assert "Not checked" not in shown(recipes[Verdict.UNDECIDED])
    twice = recipe.evidence.stability.model_copy(update={"not_checked": ("the speed (of one)", "the speed (of both)")})
    evidence = recipe.evidence.model_copy(update={"stability": twice})
    assert "Not checked: the speed\n" in shown(recipe.model_copy(update={"evidence": evidence}))


def test_a_watch_is_told_in_a_sentence(recipes):
    leak = Check(name="leak", passed=False, value=1.0, limit=0.0, detail="it grows by 3 MiB a minute")
    rate = Interval(value=5982.0, low=5900.0, high=6000.0)
    told = {
        checks: unfolded(shown(recipes[Verdict.FASTER], watch=Watch(seconds=18.2, throughput=rate, checks=checks)))
        for checks in ((), (leak,))
    }
    assert "for 18 s without a pause at 5,982 samples/s" in told[()]
    assert "no memory leak and no hang" in told[()]
    assert "it grows by 3 MiB a minute" in told[(leak,)]
    failed = Watch(seconds=3.0, throughput=None, checks=(), failure="out of memory")
    text = unfolded(shown(recipes[Verdict.FASTER], watch=failed))
    assert "failed while it trained without a pause (`--soak`): out of memory." in text


def test_a_rate_from_one_slice_has_no_interval(recipes):
    one = Interval(value=4000.0, low=4000.0, high=4000.0)
    text = shown(recipes[Verdict.UNDECIDED], throughput=one, baseline_throughput=one)
    (line,) = (line for line in text.splitlines() if "samples/s" in line)
    assert line.split() == ["samples/s", "4,000"]


def test_bounds_that_are_the_figure_itself_are_not_shown():
    assert ratio(Interval(value=1.5, low=1.5, high=1.5)) == "×1.50"
    assert ratio(Interval(value=1.5, low=1.4, high=1.6)) == "×1.50 (1.40 to 1.60)"


def test_a_speed_is_in_the_unit_of_what_is_counted():
    baseline = record(phase=Phase.BASELINE, speedup=None, throughput=Interval(value=2.4, low=2.0, high=3.0))
    assert "2.4 updates/s" in drawn([TrialEnded(record=baseline, changes="baseline", unit="updates")], terminal=False)


def shown_at(recipe, *rates, samples=None, script=None, examples_per_epoch=None):
    """What is shown of a training that has this number of samples, before and after at these rates."""
    workload = {"train_samples": samples, "script": script}
    changes = {
        "workload": recipe.workload.model_copy(update=workload),
        "created_by": recipe.created_by.model_copy(update={"spent_seconds": 600.0}),
    }
    before, after = (Interval(value=rate, low=rate, high=rate) for rate in rates)
    figures = {"baseline_throughput": before, "throughput": after, "examples_per_epoch": examples_per_epoch}
    return shown(recipe.model_copy(update=changes), **figures)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (3_600_000, "Your training of 3,600,000 samples: 1:00:00 → 30:00 (tuning took 10:00)"),
        (59_000, ""),  # a training of less than a minute
    ],
)
def test_the_time_of_a_training_is_told_from_a_minute_on(recipes, samples, said):
    text = shown_at(recipes[Verdict.FASTER], 1000.0, 2000.0, samples=samples)
    assert "".join(line for line in text.splitlines() if line.startswith("Your training of")) == said


def test_no_total_is_claimed_of_a_training_that_may_end_early(recipes):
    script = ScriptFacts(trains=Trains.FIT, baseline={}, ends_early="EarlyStopping (train.py, line 30)")
    text = shown_at(recipes[Verdict.FASTER], 1000.0, 2000.0, script=script, examples_per_epoch=80_000)
    assert "An epoch: 1:20 → 0:40 (tuning took" in text
    assert "; EarlyStopping (train.py, line 30) may end your training early" in unfolded(text)
    assert "Your training of" not in text


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        (30.0, "31:40 → 30:50 (tuning took 10:00); 30 min of it for "),
        (None, "1:40 → 0:50 (tuning took 10:00); without the time of "),
    ],
)
def test_a_total_contains_what_writers_take_or_says_not(recipes, seconds, times):
    script = ScriptFacts(trains=Trains.FIT, baseline={}, left_out=("ModelCheckpoint",), writing_seconds=seconds)
    text = shown_at(recipes[Verdict.FASTER], 600.0, 1200.0, script=script, samples=60_000, examples_per_epoch=1000)
    assert f"samples: {times}ModelCheckpoint" in unfolded(text)


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_tuning_from_python_shows_its_lines_in_a_notebook_only(capsys, monkeypatch, in_notebook):
    def run_tuning(request, observe, *, wait):
        observe(Began(text="importing the workload"))

    monkeypatch.setattr("rich.console._is_jupyter", lambda: in_notebook)
    monkeypatch.setattr(
        "autotune.front.tune.read_request", lambda *_, **__: SimpleNamespace(directory=RunDirectory("."))
    )
    monkeypatch.setattr("autotune.front.tune.run_tuning", run_tuning)
    monkeypatch.setattr("autotune.report.page.try_write_page", lambda path: "")
    autotune.tune("train.py")
    assert capsys.readouterr().out.split() == (["0:00", "importing", "the", "workload"] if in_notebook else [])
