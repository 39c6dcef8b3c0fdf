"""A trial process sees what the stability checks need: retracing, steps that a loss scale skips."""

import itertools

import pytest

from autotune.data.record import Outcome
from autotune.runtime.protocol import Data
from autotune.stats.stability import HOST_GROWTH, check_memory_growth


def slices(trial, count=2, seconds=0.4):
    """So many slices of a trial that has warmed up."""
    return [trial.measure(seconds) for _ in range(count)]


@pytest.mark.parametrize("jit_compile", [True, False])
def test_new_lengths_are_compiled_for_by_xla_alone(launch, jit_compile):
    trial = launch("ragged", jit_compile=jit_compile)
    warm = trial.warm_up()
    assert warm.started.jit_compile is jit_compile
    seen = [slice_.retraces for slice_ in slices(trial)]
    assert all(seen) if jit_compile else seen == [0, 0]


@pytest.mark.parametrize(("case", "jit_compile"), [("pairs", True), ("long_epoch", False)])
def test_a_fixed_shape_is_traced_once(launch, case, jit_compile):
    trial = launch(case, jit_compile=jit_compile)
    trial.warm_up()
    assert [slice_.retraces for slice_ in slices(trial)] == [0, 0]


def test_a_smaller_last_batch_that_comes_late_is_one_retrace(launch):
    trial = launch("late_remainder", jit_compile=True, data=Data(examples=644, endless=False))
    assert trial.warm_up().ready.timed_by == "steps"
    assert "2 times" not in trial.log.read_text()
    for _ in range(60):
        retraces = trial.measure(1.0).retraces
        assert retraces == ("2 times" in trial.log.read_text())
        if retraces:
            return
    pytest.fail("no slice reached the end of the epoch")


def test_python_numbers_are_traced_for_each_time(launch):
    trial = launch("impatient")
    trial.warm_up()
    part = trial.measure(0.5)
    assert part.retraces == part.steps > 1
    assert part.skipped_steps is None


@pytest.mark.parametrize(
    ("case", "least", "most", "steps_per_execution"), [("overflows", 0.99, 1.0, 4), ("pairs", 0.0, 0.05, 1)]
)
def test_skipped_steps_are_counted(launch, case, least, most, steps_per_execution):
    trial = launch(case, precision="mixed_float16", steps_per_execution=steps_per_execution)
    trial.warm_up()
    parts = slices(trial)
    assert least <= sum(each.skipped_steps for each in parts) / sum(each.steps for each in parts) <= most
    assert all(each.steps == each.epochs * 7 for each in parts)


@pytest.mark.parametrize(("case", "passes"), [("hoarding", False), ("endless", True)])
def test_a_leak_is_seen_in_a_continuous_run(launch, case, passes):
    trial = launch(case)
    trial.warm_up()
    parts = trial.trial.measure_continuously(0.3, 12, 120.0)
    trained = itertools.accumulate(each.examples for each in parts)
    samples = [(float(count), float(each.host_bytes)) for count, each in zip(trained, parts, strict=True)]
    found = check_memory_growth(
        [samples],
        [[(count, 500.0 * 2**20) for count, _ in samples]],
        name=HOST_GROWTH,
        examples_per_second=sum(each.examples for each in parts) / sum(each.seconds for each in parts),
        held_bytes=1 << 30,
        limit_bytes=16 << 30,
    )
    assert found.passed is passes, found


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("ruined", "the weight dense/"),
        ("ruined_deep", "the metric losses.d became nan"),
        ("ruined_each", "the metric d became nan"),
    ],
)
def test_a_model_that_hides_its_losses_must_be_finite_too(launch, case, what):
    failure = launch(case, 80).failure()
    assert failure.outcome is Outcome.NONFINITE
    assert what in failure.reason
    trial = launch(case, 64)
    trial.warm_up()
    assert trial.measure().loss is None
    trial.trial.finish(0.0, 30.0)
