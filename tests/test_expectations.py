"""The table of expectations, and the context that selects its rows."""

import math

import pytest
from simulated_runs import BASELINE, LIMITS, a_pair, a_record, a_slice

from autotune.data.figures import Interval
from autotune.data.record import StepSeconds
from autotune.space.changes import Context
from autotune.space.knobs import KNOBS
from autotune.tuning.beliefs import (
    NEUTRAL,
    TABLE,
    Expectation,
    Expectations,
    ExpectationsFile,
    classify_change,
    effective_doublings,
    find_unit,
    load_expectations,
)
from autotune.tuning.candidates import describe_context, has_short_epochs, waits_for_input

ROW = Expectation(knob="prefetch", change="2", device="cpu", limit="input", speedup=1.5, spread=0.1, source="test")


USUAL = {"units": (), "limits": LIMITS, "on_gpu": False, "measured_seconds": 2.0, "import_seconds": 5.0}


def context_of(baseline, **fields):
    """The context while the baseline is the fastest."""
    return describe_context(baseline, baseline, [], **{**USUAL, **fields})


def test_packaged_expectations_name_valid_knobs_and_sources():
    rows = ExpectationsFile.model_validate_json(TABLE.read_bytes()).rows
    assert rows
    for row in rows:
        units = {unit for wanted in KNOBS[row.knob].units.values() for unit in wanted} | {"", "none"}
        assert row.unit in units
        assert row.source.startswith(("recorded: ", "literature: "))
        assert (row.trials > 0) == row.source.startswith("recorded: ")
    assert len({(row.knob, row.change, row.device, row.limit, row.unit) for row in rows}) == len(rows)


def test_low_precision_is_expected_to_pay_on_units_that_have_it():
    for on_gpu, unit in ((False, "amx_bf16"), (True, "tensor_bf16")):
        now = Context(on_gpu=on_gpu, units=frozenset({unit}), short_steps=False)
        row = load_expectations().find("precision", "mixed_bfloat16", now, unit)
        assert row.speedup > 1.3


def test_the_row_of_the_same_limit_comes_before_that_of_any():
    whole = ROW.model_copy(update={"limit": "", "speedup": 1.1})
    table = Expectations([ROW, whole])
    assert table.find("prefetch", "2", Context(waits_for_input=True), "") == ROW
    assert table.find("prefetch", "2", Context(), "") == whole
    assert table.find("prefetch", "8", Context(), "") == NEUTRAL
    assert Expectations([ROW]).find("prefetch", "2", Context(), "") == NEUTRAL


def test_what_the_host_limits_is_expected_alike_on_a_gpu():
    compute = ROW.model_copy(update={"limit": "compute"})
    table = Expectations([ROW, compute])
    assert table.find("prefetch", "2", Context(on_gpu=True, waits_for_input=True), "") == ROW
    assert table.find("prefetch", "2", Context(on_gpu=True, short_steps=False), "") == NEUTRAL


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [(32, 128, "up"), (32, 16, "down"), (0, 2, "some"), ("autotune", 2, "some"), (2, 0, "0"), (False, True, "true")],
)
def test_changes_are_classified(before, after, change):
    assert classify_change(before, after) == change


def test_a_value_is_fast_on_the_best_unit_that_there_is():
    assert find_unit("precision", "mixed_bfloat16", {"avx512_bf16", "amx_bf16"}) == "amx_bf16"
    assert find_unit("precision", "mixed_bfloat16", {"avx512_fp16"}) == "none"
    assert find_unit("precision", "float32", {"amx_bf16"}) == find_unit("batch_size", 64, ()) == ""


def test_further_doublings_gain_less():
    assert effective_doublings(2) == pytest.approx(1.0)
    assert 1.0 < effective_doublings(4) < 2.0
    assert effective_doublings(1 / 4) == effective_doublings(4)


@pytest.mark.parametrize(
    ("known", "others", "waits"), [(0.5, None, True), (None, 0.5, True), (0.0, 0.5, False), (None, 0.0, False)]
)
def test_input_wait_is_the_fastest_trials_or_the_latest_known(known, others, waits):
    best, beside = (
        a_record(BASELINE, speedup=1.1).model_copy(update={"input_wait_fraction": share}) for share in (known, others)
    )
    assert describe_context(best, best, [beside], **USUAL).waits_for_input is waits


def a_wait(share, cores, cpu, others=0.0):
    """A trial that waits for input for a share of its time, and of cores takes so many, beside others that do."""
    part = a_slice(seconds=1.0).model_copy(update={"cores": cores, "cpu_seconds": cpu, "foreign_cpu_seconds": others})
    return a_record(slices=(part,)).model_copy(update={"input_wait_fraction": share})


@pytest.mark.parametrize(
    ("waiting", "calls"),
    [
        (a_wait(0.8, 2, 1.2), 2),  # a serial map that computes
        (a_wait(0.5, 8, 4.7), 8),
        (a_wait(0.8, 2, 1.9), 1),  # as many as there are cores
        (a_wait(0.6, 1, 0.98), 1),
        (a_wait(0.6, 1, 0.5, others=0.49), 1),
        (a_wait(0.8, 1, 0.7), 2),  # it computes, and waits for a disk
        (a_wait(0.9, 1, 0.15), math.inf),  # it waits for a network
        (a_wait(0.9, 2, 0.2, others=0.5), math.inf),
        (a_wait(0.95, 1, 0.12, others=0.88), math.inf),  # others fill what it leaves
        (a_wait(0.0, 1, 1.0), math.inf),
    ],
)
def test_calls_help_an_input_as_far_as_it_leaves_cores_idle(waiting, calls):
    assert describe_context(a_record(), a_record(), [waiting], **USUAL).most_calls == calls


@pytest.mark.parametrize(
    ("changes", "others", "most"), [({}, 0.0, 3), ({}, None, 4), ({"intra_op_threads": 1}, 0.0, 4)]
)
def test_a_pool_has_a_thread_for_each_core_unless_it_is_set(changes, others, most):
    """A quota, under which the load of others is unknown, leaves it more threads than cores."""
    part = a_slice().model_copy(update={"cores": 4, "foreign_cpu_seconds": others})
    assert context_of(a_record(BASELINE.replace(**changes), slices=(part,))).most_threads == most
    assert context_of(a_record()).most_threads == math.inf


@pytest.mark.parametrize(
    ("cpu_seconds", "others", "waits"), [(0.3, 0.1, False), (0.05, 0.1, True), (0.15, 0.35, False), (0.06, 0.44, True)]
)
def test_a_busy_candidate_whose_wait_is_not_seen_waits_not(cpu_seconds, others, waits):
    """On one core, of which others take so much: what it leaves idle tells."""
    pair, seen = a_pair(), {"cpu_seconds": cpu_seconds, "foreign_cpu_seconds": others, "cores": 1}
    pair = pair.model_copy(update={"candidate": pair.candidate.model_copy(update=seen)})
    assert waits_for_input(a_record(pairs=(pair,))) is waits


def test_units_of_the_device_count_that_trains():
    units, baseline = ("amx_bf16", "tensor_bf16"), a_record()
    assert context_of(baseline, units=units).units == {"amx_bf16"}
    assert context_of(baseline, units=units, on_gpu=True).units == {"tensor_bf16"}


@pytest.mark.parametrize(("overhead", "short"), [(0.5, True), (0.1, False), (None, False)])
def test_epochs_are_short_if_overhead_takes_a_large_share(overhead, short):
    figures = {"timed_by": "steps", "epoch_overhead_seconds": overhead, "examples_per_epoch": 40_000}
    rate = Interval(value=4000.0, low=4000.0, high=4000.0)
    assert has_short_epochs(a_record(throughput=rate, **figures)) is short
    assert has_short_epochs(a_record(timed_by="epochs"))


def test_memory_is_the_larger_share_of_host_and_device():
    part = a_slice().model_copy(update={"host_bytes": LIMITS.host_bytes // 4})
    assert context_of(a_record(slices=(part,))).memory_share == pytest.approx(0.25)
    assert context_of(a_record(slices=(a_slice(),))).memory_share is None
    assert math.isclose(context_of(a_record(first_step_seconds=7.0)).start_seconds, 7.0)


@pytest.mark.parametrize(("step", "wait", "may"), [(0.002, None, True), (0.2, None, False), (0.002, 0.0, False)])
def test_short_steps_may_wait_for_input_until_that_is_known(step, wait, may):
    steps = StepSeconds(p50=step, p90=step, p99=step, max=step)
    baseline = a_record(slices=(a_slice().model_copy(update={"step_seconds": steps}),))
    other = a_record(BASELINE, speedup=1.1).model_copy(update={"input_wait_fraction": wait})
    assert describe_context(baseline, baseline, [other], **USUAL).may_wait is may
