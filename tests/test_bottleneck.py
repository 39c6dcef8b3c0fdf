"""What limits a training, by the rules, and what is advised."""

import pytest

from autotune.data.facts import ScriptFacts, SlowPart, Trains
from autotune.data.figures import Bottleneck, Ceilings, Interval, Profile
from autotune.data.record import Outcome, Phase, Slice, StepSeconds, TrialRecord
from autotune.recipe.advice import advice
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


class Trial:
    """What advice reads of a trial's record."""

    faults_often = False

    def __init__(self, bottleneck=None, ceilings=None, rate=1000.0, profile=None, **configuration):
        self.bottleneck, self.ceilings, self.profile = bottleneck, ceilings, profile
        self.input_wait_fraction = bottleneck.share if bottleneck is not None and bottleneck.name == "input" else 0.0
        self.throughput = Interval(value=rate, low=rate, high=rate)
        self.configuration = {"num_parallel_calls": 0, **configuration}


@pytest.mark.parametrize(
    ("waits", "error", "words"), [(0.12, 0.03, "12% of its time (±3%)"), (0.02, 0.04, "2% of its time (at most 6%)")]
)
def test_the_error_of_a_wait_never_reaches_below_zero(waits, error, words):
    assert find_bottleneck(StepFigures(waits=waits, waits_error=error)).why.endswith(words)


INPUT = Bottleneck(name="input", share=0.62, why="the step waits for input 62% of its time")
SCRIPT = ScriptFacts(
    trains=Trains.FIT,
    baseline={"batch_size": 32},
    slow_parts=(
        SlowPart(what="map() in train.py, line 41 runs serially", of_input=True, knob="num_parallel_calls"),
        SlowPart(what="the step runs eagerly (train.py, line 7)", of_input=False, knob="graph_step"),
    ),
)


def test_advice_begins_with_the_line_that_costs_most():
    slow = Trial(INPUT, Ceilings(by_input=410.0, by_compute=1080.0), rate=410.0)
    first, second, third = advice(slow, None, SCRIPT, gains={"graph_step": 1.3})
    assert first.startswith("map() in train.py, line 41 runs serially: the step waits for input 62% of its time")
    assert "the pipeline alone reaches 410 samples/s, the model alone 1,080" in first
    assert second == "The step runs eagerly (train.py, line 7): graph_step alone gave ×1.30."
    assert "×2.63" in third


def test_many_page_faults_are_a_cause_after_an_eager_step():
    compute, slow = Bottleneck(name="compute", share=0.9, why="matrix products take 90%"), Trial()
    slow.bottleneck, slow.faults_often, slow.page_faults_per_step = compute, True, 50_120.4
    first, second = advice(slow, None, SCRIPT, gains={"keep_freed_memory": 3.5})
    assert first.startswith("The step runs eagerly")
    assert second.startswith("Each step has 50,120 page faults: ")
    assert second.endswith("goes back to the kernel: keep_freed_memory alone gave ×3.50.")
    assert advice(slow, None, None)[0].startswith("Each step has 50,120 page faults")


def test_a_serial_map_is_no_cause_where_steps_do_not_wait():
    compute = Bottleneck(name="compute", share=0.9, why="matrix products are 90% of the operations' time")
    said = advice(Trial(compute), None, SCRIPT)
    assert said == ["The step runs eagerly (train.py, line 7)."]


def test_a_pipeline_that_is_faster_than_the_steps_is_not_set_against_them():
    first, *_ = advice(Trial(INPUT, Ceilings(by_input=600_000.0, by_compute=47_000.0), rate=25_000.0), None, None)
    assert "waits for input 62% of its time" in first
    assert "pipeline alone" not in first


def test_a_pipeline_that_cannot_help_is_said_so():
    compute = Bottleneck(name="compute", share=0.9, why="matrix products are 90% of the operations' time")
    said = advice(Trial(compute, Ceilings(by_input=9e9, by_compute=1020.0)), Trial(compute), None)
    assert len(said) == 3
    assert said[1].startswith("Input tuning cannot make this training clearly faster")
    assert "another precision" in said[2]


def test_advice_names_no_knob_that_cannot_act():
    unreached = ("prefetch", "num_parallel_calls", "batch_size")
    assert advice(Trial(), Trial(INPUT), None, unreached=unreached)[-1].endswith(
        "62% of its time; a map of whole batches, data_threads or persistent_iterator could help further."
    )
    communication = Bottleneck(name="communication", share=0.4, why="sums over devices take 40% of a step")
    assert advice(Trial(), Trial(communication), None, unreached=unreached)[-1].endswith("take 40% of a step.")


def test_a_balanced_training_is_not_limited_by_anything():
    balanced = Bottleneck(name="balanced", share=0.5, why="matrix work and element-wise operations share the time")
    first, second = advice(Trial(balanced), Trial(balanced), None)
    assert first.startswith("The baseline is balanced: ")
    assert second.startswith("With the recipe the training is balanced: ")


def test_what_the_recipe_has_already_is_not_advised():
    limited = Bottleneck(name="compute_or_memory", share=0.9, why="the step waits for input 10% of its time")
    has = {"jit_compile": True, "precision": "mixed_bfloat16"}
    assert "; a larger batch could help further." in advice(Trial(limited), Trial(limited, **has), None)[-1]
    assert "another precision, XLA or" in advice(Trial(limited), Trial(limited, jit_compile="auto"), None)[-1]


def test_a_profile_that_could_not_be_read_is_told_once():
    limited = Bottleneck(name="compute_or_memory", share=0.9, why="the step waits for input 10% of its time")
    unread = Trial(limited, Ceilings(by_input=9e9, by_compute=2000.0), profile=Profile(reason=NOT_INSTALLED))
    said = advice(unread, unread, None)
    assert [text for text in said if "pip install xprof" in text] == said[-1:]
    assert len(said) == 4
    assert "profile" not in "".join(said[:-1])


def test_without_figures_there_is_no_advice():
    unknown = Bottleneck(name="unknown", why="nothing was measured")
    assert advice(Trial(unknown), None, None) == []
    assert advice(Trial(), Trial(), None) == []


@pytest.mark.parametrize(
    ("bounds", "share"),
    [
        ({"HBM": 6.0, "Compute": 2.0}, 0.75),
        ({"Compute": 2.0, "Unknown": 1.0}, 0.0),
        ({"HBM": 1.0, "Unknown": 9.0}, None),
    ],
)
def test_the_roofline_of_a_gpu_is_read_where_most_operations_are_known(monkeypatch, bounds, share):
    columns = ["step", "category", "bound_by", "total_self_time", "include_infeed_outfeed"]
    rows = [("Total", "Program", "HBM", 100.0, False), ("3", "MatMul", "HBM", 100.0, False)]
    rows += [("Total", "MatMul", bound, seconds, False) for bound, seconds in bounds.items()]
    rows += [("Total", "MatMul", "HBM", 100.0, True)]
    table = {"cols": [{"id": each} for each in columns], "rows": [{"c": [{"v": v} for v in row]} for row in rows]}
    monkeypatch.setattr(xprof_reader, "_asked", lambda planes, tool: [table] if tool == "roofline_model" else None)
    assert xprof_reader._of_gpu([]) == ([], share)
