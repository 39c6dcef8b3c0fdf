"""What limits a training, by the rules, and what is advised."""

import json
from pathlib import Path

import pytest
from simulated_runs import BASELINE

from autotune.data.facts import ScriptFacts, Site, SlowPart, Trains
from autotune.data.figures import Bottleneck, Ceilings, Interval, Profile
from autotune.data.record import Outcome, Phase, Slice, StepSeconds, TrialRecord
from autotune.recipe.advice import advice, diagnose
from autotune.report import xprof_reader
from autotune.stats.bottleneck import NOT_INSTALLED, StepFigures, find_bottleneck
from autotune.tuning.trial import limit_of


def profile(**changes):
    """A profile in which nothing stands out; its step takes a millisecond."""
    usual = {
        "steps": 20,
        "step_seconds": 1e-3,
        "operation_seconds": 1e-3,
        "usual_operation_seconds": 5e-5,
        "matrix_share": 0.5,
    }
    return Profile(**usual | changes)


@pytest.mark.parametrize(
    ("seen", "name", "figure"),
    [
        (StepFigures(waits=0.25), "input", 0.25),
        (StepFigures(waits=0.25, profile=profile(operation_seconds=1e-4)), "input", 0.25),
        (StepFigures(waits=0.25, waits_error=0.1), "input", 0.25),
        (StepFigures(waits=0.25, waits_error=0.22), "balanced", 0.25),
        (StepFigures(waits=0.16, waits_error=0.08), "balanced", 0.16),
        (StepFigures(waits=0.02, waits_error=0.04), "compute_or_memory", 0.98),
        (StepFigures(waits=0.06, waits_error=0.04), "compute_or_memory", 0.94),
        (StepFigures(waits=0.0, waits_error=0.25), "balanced", 0.0),
        (StepFigures(waits=0.06, waits_error=0.78), "unknown", None),
        (StepFigures(waits=0.3, ceilings=Ceilings(by_input=23_528.0, by_compute=9_212.0)), "compute_or_memory", 0.7),
        (StepFigures(waits=0.3, ceilings=Ceilings(by_input=1_260.0, by_compute=1_000.0)), "compute_or_memory", 0.7),
        (StepFigures(waits=0.3, ceilings=Ceilings(by_input=1_240.0, by_compute=1_000.0)), "input", 0.3),
        (StepFigures(waits=0.3, ceilings=Ceilings(by_input=23_528.0, by_compute=None)), "input", 0.3),
        (StepFigures(waits=0.3, ceilings=Ceilings(by_input=9_212.0, by_compute=12_500.0)), "input", 0.3),
        (StepFigures(waits=0.3, outside=0.2, ceilings=Ceilings(by_input=23_528.0, by_compute=9_212.0)), "launch", 0.2),
        (StepFigures(waits=0.06), "balanced", 0.06),
        (StepFigures(waits=0.06, outside=0.2), "launch", 0.2),
        (StepFigures(waits=0.06, profile=profile(operation_seconds=3e-4)), "launch", 0.7),
        (StepFigures(waits=0.06, profile=profile(step_seconds=1.0, operation_seconds=5e-5)), "balanced", 0.06),
        (StepFigures(waits=0.01, profile=profile(step_seconds=1.0, operation_seconds=5e-5)), "compute_or_memory", 0.99),
        (StepFigures(waits=0.01, profile=profile(breakdown={"launch": 2e-4})), "launch", 0.2),
        (StepFigures(waits=0.01, profile=profile(breakdown={"communication": 2e-4})), "communication", 0.2),
        (StepFigures(waits=0.01, outside=0.05, profile=profile(matrix_share=0.9)), "compute", 0.9),
        (StepFigures(waits=0.01, profile=profile(matrix_share=0.1)), "memory_bandwidth", 0.9),
        (StepFigures(waits=0.01, profile=profile()), "balanced", 0.5),
        (StepFigures(waits=0.01, profile=profile(matrix_share=0.9, memory_bound_share=0.7)), "memory_bandwidth", 0.7),
        (StepFigures(waits=0.01, profile=profile(matrix_share=0.1, memory_bound_share=0.2)), "compute", 0.8),
        (StepFigures(waits=0.01, profile=profile(matrix_share=0.9, memory_bound_share=0.5)), "compute", 0.9),
        (StepFigures(waits=0.01, profile=profile(operation_seconds=4e-3)), "balanced", 0.5),
        (StepFigures(waits=0.3, profile=profile(breakdown={"input": 1e-5, "compute": 9.9e-4})), "balanced", 0.5),
        (StepFigures(waits=0.01, profile=profile(breakdown={"input": 3e-4, "compute": 7e-4})), "input", 0.3),
        (StepFigures(waits=0.01), "compute_or_memory", 0.99),
        (StepFigures(waits=0.01, gpu=0.5), "launch", 0.5),
        (StepFigures(waits=0.01, gpu=0.5, profile=profile()), "balanced", 0.5),
        (StepFigures(waits=0.06, gpu=0.5), "balanced", 0.06),
        (StepFigures(waits=0.01, gpu=0.97, gpu_memory=0.7), "memory_bandwidth", 0.7),
        (StepFigures(waits=0.01, gpu=0.97, gpu_memory=0.55), "compute_or_memory", 0.99),
        (StepFigures(waits=0.01, profile=Profile(reason="xprof is not installed")), "compute_or_memory", 0.99),
        (StepFigures(), "unknown", None),
        (StepFigures(waits=0.0, profile=profile(matrix_share=None)), "unknown", None),
    ],
)
def test_the_rules_name_what_limits_a_trial(seen, name, figure):
    found = find_bottleneck(seen)
    assert found.name == name
    assert found.share == (None if figure is None else pytest.approx(figure))
    assert found.why


@pytest.mark.parametrize(
    ("paces", "name"),
    [
        ((1.0, 1.01, 0.99, 1.0), "input"),  # steady: 24% are 24%
        ((1.0, 1.3, 0.8, 1.1), "balanced"),  # restless: another trial of it may say 0%
        ((1.0,), "input"),  # a single slice has no spread
    ],
)
def test_the_input_wait_is_known_as_well_as_the_slices_agree(paces, name):
    steps = StepSeconds(p50=0.1, p90=0.1, p99=0.1, max=0.1)
    slices = [
        Slice(seconds=pace, steps=10, examples=320, epochs=0, cpu_seconds=pace, step_seconds=steps) for pace in paces
    ]
    record = TrialRecord(
        trial=1,
        phase=Phase.SEARCH,
        configuration={},
        outcome=Outcome.OK,
        started_at="2026-11-20T19:10:01.250+00:00",
        seconds=3.5,
        slices=tuple(slices),
        input_wait_fraction=0.24,
    )
    assert limit_of(record).name == name


def a_trial(trial=0, bottleneck=None, *, rate=1000.0, changes=None, **fields):
    """A trial's record, as far as a diagnosis reads it; of the baseline without `changes`."""
    if bottleneck is not None and bottleneck.name == "input":
        fields = {"input_wait_fraction": bottleneck.share, **fields}
    values = {
        "phase": Phase.SEARCH if changes else Phase.BASELINE,
        "configuration": {**BASELINE, **(changes or {})},
        "outcome": Outcome.OK,
        "throughput": Interval(value=rate, low=rate, high=rate),
    }
    times = {"started_at": "2026-11-20T19:10:01.250+00:00", "seconds": 3.5}
    return TrialRecord(trial=trial, bottleneck=bottleneck, **times, **{**values, **fields})


def of_speed(value, low=None, high=None, **changes):
    """A search trial of the baseline with changes that was so much faster."""
    return a_trial(1, speedup=Interval(value=value, low=low or value, high=high or value), changes=changes)


CASES = json.loads((Path(__file__).parent / "data" / "diagnoses.json").read_text(encoding="utf-8"))
"""Figures of real runs of trainings whose limit is known from how they were written: Python or a slow map in the input,
steps of tiny operations, convolutions, an optimizer that updates a large table."""


def test_diagnosis_of_recorded_runs_is_right_or_rarely_unknown():
    found = {}
    for case in CASES:
        known = case["baseline"] | {"bottleneck": Bottleneck(**case["baseline"]["bottleneck"])}
        trials = [
            a_trial(number, **{**trial, "configuration": case["usual"] | trial["changes"]})
            for number, trial in enumerate(case["trials"], 1)
        ]
        found[case["name"]] = diagnose(a_trial(configuration=case["usual"], **known), trials).name
    truths = {case["name"]: case["truth"] for case in CASES}
    assert len(found) == 12
    assert {name: limit for name, limit in found.items() if limit not in ("unknown", truths[name])} == {}
    assert list(found.values()).count("unknown") <= 4


def test_fewer_calls_that_were_faster_name_the_launch_as_limit():
    unknown = Bottleneck(name="compute_or_memory", share=1.0, why="the step waits for input 0% of its time")
    baseline = a_trial(0, unknown, input_wait_fraction=0.0)
    faster = of_speed(2.3, 2.1, 2.5, steps_per_execution=16)
    (said,) = advice(baseline, None, None, [faster])
    assert said == "Launch-bound: steps_per_execution=16 alone gave ×2.30 (2.10 to 2.50)."
    vague = of_speed(2.3, 1.1, 4.9, steps_per_execution=16)
    with_more = of_speed(2.3, 2.1, 2.5, steps_per_execution=16, batch_size=128)
    for trial in (vague, with_more):
        (said,) = advice(baseline, None, None, [trial])
        assert said == "The bottleneck is unknown (the step waits for input 0% of its time)."


def test_input_is_the_limit_only_if_the_pipeline_alone_is_slower():
    waits = Bottleneck(name="input", share=0.3, why="the step waits for input 30% of its time (±19%)")
    fast, slow = Ceilings(by_input=12_900.0, by_compute=7_600.0), Ceilings(by_input=5_000.0, by_compute=7_600.0)
    assert [diagnose(a_trial(0, waits, ceilings=top)).name for top in (None, fast, slow)] == ["unknown"] * 2 + ["input"]
    hidden = Bottleneck(name="launch", share=0.9, why="its operations leave 90% of a step to starting them")
    assert diagnose(a_trial(0, hidden, input_wait_fraction=0.8)).name == "input"
    without = of_speed(1.0, 0.99, 1.02, steps_per_execution=16)
    assert diagnose(a_trial(0, hidden, input_wait_fraction=0.0), [without]).name == "unknown"


@pytest.mark.parametrize(
    ("waits", "error", "words"), [(0.12, 0.03, "12% of its time (±3%)"), (0.02, 0.04, "2% of its time (at most 6%)")]
)
def test_the_error_of_a_wait_never_reaches_below_zero(waits, error, words):
    assert find_bottleneck(StepFigures(waits=waits, waits_error=error)).why.endswith(words)


COMPUTE = Bottleneck(name="compute", share=0.9, why="matrix products are 90% of the operations' time")
SITE = Site(file="train.py", function="main", call="batch", order=0, line=12)
INPUT = Bottleneck(name="input", share=0.62, why="the step waits for input 62% of its time")
SCRIPT = ScriptFacts(
    trains=Trains.FIT,
    baseline={"batch_size": 32},
    slow_parts=(
        SlowPart(what="map() in train.py, line 41 runs serially", limit="input", knob="num_parallel_calls"),
        SlowPart(what="the step runs eagerly (train.py, line 7)", limit="launch", knob="graph_step"),
    ),
)


def test_advice_begins_with_the_line_that_costs_most():
    slow = a_trial(0, INPUT, ceilings=Ceilings(by_input=410.0, by_compute=1080.0), rate=410.0)
    first, second, third = advice(slow, None, SCRIPT, [of_speed(1.3, graph_step=True)])
    assert first == (
        "Input-bound: map() in train.py, line 41 runs serially; the step waits for input 62% of its time; "
        "the pipeline alone reaches 410 samples/s, the model alone 1,080."
    )
    assert second == "The step runs eagerly (train.py, line 7) (graph_step alone gave ×1.30)."
    assert "×2.63" in third


def test_serial_map_explains_an_input_wait_seen_in_a_profile():
    first, *_ = advice(a_trial(0, INPUT, input_wait_fraction=0.0), None, SCRIPT)
    assert first.startswith("Input-bound: map() in train.py, line 41 runs serially; ")


def test_a_serial_map_is_no_cause_where_steps_do_not_wait():
    said = advice(a_trial(0, COMPUTE), None, SCRIPT)
    assert said == [f"Compute-bound: {COMPUTE.why}.", "The step runs eagerly (train.py, line 7)."]


def test_a_pipeline_that_cannot_help_is_said_so():
    top = Ceilings(by_input=9e9, by_compute=1020.0)
    said = advice(a_trial(0, COMPUTE, ceilings=top), a_trial(1, COMPUTE), None)
    assert len(said) == 3
    assert said[1].startswith("Input tuning cannot make this training clearly faster")
    assert "another precision" in said[2]


def test_advice_skips_changes_tried_in_force_or_out_of_reach():
    unreached = ("prefetch", "num_parallel_calls")
    recommended = a_trial(1, INPUT)
    left = advice(a_trial(), recommended, None, [of_speed(0.9, data_threads=4)], unreached=unreached)[-1]
    assert left.endswith("62% of its time; not tried yet: a map of whole batches, persistent_iterator.")
    has = a_trial(1, COMPUTE, changes={"precision": "mixed_bfloat16"})
    script = SCRIPT.model_copy(update={"sites": {"batch_size": (SITE,)}})
    left = advice(a_trial(0, COMPUTE), has, script)[-1]
    assert left.endswith("; not tried yet: XLA, a larger batch (batch() in train.py, line 12).")
    slower = [of_speed(0.8, jit_compile=True), of_speed(0.9, precision="mixed_bfloat16"), of_speed(1.0, batch_size=64)]
    assert advice(a_trial(0, COMPUTE), a_trial(1, COMPUTE), None, slower)[-1] == (
        f"With the recipe it is compute-bound: {COMPUTE.why}."
    )


def test_a_balanced_training_is_not_limited_by_anything():
    balanced = Bottleneck(name="balanced", share=0.5, why="matrix work and element-wise operations share the time")
    said = advice(a_trial(0, balanced), a_trial(1, balanced), None)
    assert said == [f"The bottleneck is unknown ({balanced.why})."]


def test_a_profile_that_could_not_be_read_is_told_once():
    limited = Bottleneck(name="compute_or_memory", share=0.9, why="the step waits for input 10% of its time")
    unread = {"ceilings": Ceilings(by_input=9e9, by_compute=2000.0), "profile": Profile(reason=NOT_INSTALLED)}
    for limit in (limited, COMPUTE):
        said = advice(a_trial(0, limit, **unread), a_trial(1, limit, **unread), None)
        assert sum("pip install xprof" in text for text in said) == 1


@pytest.mark.parametrize(
    ("bounds", "share"),
    [
        ({"HBM": 6.0, "Compute": 2.0}, 0.75),
        ({"Compute": 2.0, "Unknown": 1.0}, 0.0),
        ({"HBM": 1.0, "Unknown": 9.0}, None),
    ],
)
def test_gpu_roofline_needs_mostly_known_operations(monkeypatch, bounds, share):
    columns = ["step", "category", "bound_by", "total_self_time", "include_infeed_outfeed"]
    rows = [("Total", "Program", "HBM", 100.0, False), ("3", "MatMul", "HBM", 100.0, False)]
    rows += [("Total", "MatMul", bound, seconds, False) for bound, seconds in bounds.items()]
    rows += [("Total", "MatMul", "HBM", 100.0, True)]
    table = {"cols": [{"id": column} for column in columns], "rows": [{"c": [{"v": v} for v in row]} for row in rows]}
    monkeypatch.setattr(xprof_reader, "_asked", lambda planes, tool: [table] if tool == "roofline_model" else None)
    assert xprof_reader._of_gpu([]) == ([], share)
