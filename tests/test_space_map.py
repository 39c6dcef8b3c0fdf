"""The map of a search space: what was tried with its ratio, what was ruled out and why, what was not reached."""

from types import SimpleNamespace

from simulated_runs import BASELINE, a_record

from autotune.data.record import Outcome, Phase
from autotune.data.run_directory import SearchSpaceRecord
from autotune.report.charts import Spot, map_space

SPACE = SearchSpaceRecord(
    source="mine.toml",
    choices={"batch_size": (32, 64, 256), "steps_per_execution": (1, 4, 16)},
    left_out={
        "precision": "the script chooses it",
        "batch_size=16": "too small",
        "jit_compile": "the script chooses it",
    },
)
RUN = SimpleNamespace(search_space=SPACE, baseline=dict(BASELINE))


def test_each_value_has_its_best_ratio_its_reason_or_neither():
    faster = BASELINE.replace(batch_size=64)
    records = [
        a_record(phase=Phase.BASELINE, trial=0),
        a_record(faster, speedup=1.5, trial=3),
        a_record(faster.replace(steps_per_execution=4), speedup=1.25),
        a_record(BASELINE.replace(batch_size=256), outcome=Outcome.OOM, reason="out of memory\nin line 3"),
    ]
    mapped = map_space(RUN, records, faster)
    assert mapped["batch_size"] == [
        Spot("32", 1.0, 0, kinds=("now",)),
        Spot("64", 1.5, 3, kinds=("chosen",)),
        Spot("256", why="out of memory"),
        Spot("16", why="too small"),
    ]
    assert [(spot.value, spot.ratio) for spot in mapped["steps_per_execution"]] == [
        ("1", 1.5),
        ("4", 1.25),
        ("16", 0.0),
    ]
    assert mapped["precision, jit_compile"] == [Spot("ruled out", why="the script chooses it")]


def test_a_value_that_was_not_in_force_is_shown_as_what_was():
    asked, given = BASELINE.replace(steps_per_execution=16), BASELINE.replace(steps_per_execution=15)
    spots = map_space(RUN, [a_record(given, asked=dict(asked), speedup=2.0)], None)["steps_per_execution"]
    assert [(spot.value, spot.ratio) for spot in spots] == [("1", 0.0), ("4", 0.0), ("15", 2.0)]


def test_a_run_that_was_cut_off_has_no_map():
    assert map_space(SimpleNamespace(search_space=None, baseline=None), [], None) == {}
