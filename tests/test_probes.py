"""Single changes to the baseline, and what to combine of them."""

from simulated_runs import BASELINE, GROWING_SPACE, SMALL_SPACE, space_of

from autotune.space.search_space import find_search_space
from autotune.study.probes import combination, doublings, probes, pushed

PARALLEL_SPACE = """
schema_version = 1
[knobs.num_parallel_calls]
kind = "categorical"
choices = [0, 4, 12]
[knobs.data_threads]
kind = "categorical"
choices = [0, 24]
[knobs.prefetch]
kind = "categorical"
choices = [0, 2, 8]
"""


def changes(configurations):
    """How each configuration differs from the baseline."""
    return [configuration.differences(BASELINE) for configuration in configurations]


def shipped(name):
    """A shipped search space, resolved for the simulated machine."""
    written = find_search_space(name)
    return written.resolve(baseline=BASELINE, device="cpu", cores=2, examples=1437, dataset_takes_config=True)


def test_probes_change_one_thing_at_a_time():
    """Every probe of a shipped space differs in one knob, threads and parallel calls of the pipeline aside."""
    for name in ("quick", "cpu"):
        for each in changes(probes(shipped(name))):
            assert len(each) == 1 or set(each) == {"num_parallel_calls", "data_threads"}


def test_the_shipped_space_is_probed_in_this_order():
    """What helps most often comes first; numbers are the nearest choices of the space to those wished for."""
    assert changes(probes(shipped("quick"))) == [
        {"batch_size": 128},
        {"steps_per_execution": 8},
        {"data_autotune": False},
        {"jit_compile": True},
        {"precision": "mixed_bfloat16"},
        {"num_parallel_calls": 16, "data_threads": 16},
        {"prefetch": 2},
        {"batch_size": 64},
        {"prefetch": "autotune"},
        {"steps_per_execution": 16},
    ]


def test_threads_and_kernels_are_probed_where_they_vary():
    """The larger space adds threads, oneDNN and the order of the examples, one at a time."""
    found = changes(probes(shipped("cpu")))
    for change in (
        {"intra_op_threads": 1},
        {"inter_op_threads": 1},
        {"onednn": False},
        {"deterministic": False},
    ):
        assert change in found


def test_no_probe_comes_twice_and_none_is_the_baseline():
    """A wish that snaps to a value that was probed already, or to the baseline's, adds nothing."""
    narrow = space_of(SMALL_SPACE.replace("512", "64"))
    for space in (shipped("quick"), shipped("cpu"), narrow):
        found = probes(space)
        assert len(set(found)) == len(found) >= 3
        assert BASELINE not in found


def test_probes_stay_in_the_space():
    """A wish for a number becomes the nearest choice; a knob that does not vary is not probed."""
    space = space_of(PARALLEL_SPACE)
    assert changes(probes(space)) == [{"num_parallel_calls": 12, "data_threads": 24}, {"prefetch": 2}]
    assert all(each in space for each in probes(space))


def test_the_batch_size_is_probed_relative_to_the_baselines():
    """Four and two times the baseline's batch size, the larger first."""
    sizes = [each["batch_size"] for each in changes(probes(space_of())) if "batch_size" in each]
    assert sizes == [128, 64]


def test_a_boolean_is_not_taken_for_a_number():
    """`jit_compile = true` is probed as true and never as 1."""
    jit = [each["jit_compile"] for each in changes(probes(space_of())) if "jit_compile" in each]
    assert jit == [True]


def test_a_word_is_probed_only_where_it_is_a_choice():
    """A space without "autotune" and without bfloat16 gets no such probe."""
    named = [value for each in changes(probes(space_of(PARALLEL_SPACE))) for value in each.values()]
    assert not [value for value in named if isinstance(value, str)]


def test_doublings_climb_from_the_baseline():
    """A batch size that grows until memory ends is tried in ascending order, above the baseline's only."""
    sizes = doublings(space_of(GROWING_SPACE, examples=4096))
    assert sizes == [64, 128, 256, 512, 1024]


def test_a_bounded_batch_size_is_not_doubled():
    """Only `high = "memory"` asks for doubling."""
    assert doublings(space_of()) == []


def test_what_helped_is_combined():
    """All single changes that led go into one configuration; what did not help stays out."""
    leads = {
        BASELINE.replace(batch_size=128): 0.3,
        BASELINE.replace(jit_compile=True): 0.2,
        BASELINE.replace(steps_per_execution=8): -0.1,
    }
    expected = BASELINE.replace(batch_size=128, jit_compile=True)
    assert combination(space_of(), leads) == expected


def test_of_several_values_of_a_knob_the_one_that_leads_most_is_combined():
    """The order in which they were measured does not matter."""
    leads = {BASELINE.replace(batch_size=128): 0.4, BASELINE.replace(batch_size=64): 0.2}
    for each in (leads, dict(reversed(leads.items()))):
        assert combination(space_of(), each).batch_size == 128


def test_a_gain_within_its_error_is_not_combined():
    """A lead of nothing, after the error is taken away, is noise."""
    assert combination(space_of(), {BASELINE.replace(jit_compile=True): 0.0}) == BASELINE


def test_changes_of_several_knobs_are_no_single_changes():
    """What the sampler mixed is not taken apart, but the pair that is probed together counts as one change."""
    mixed = BASELINE.replace(jit_compile=True, batch_size=64)
    assert combination(space_of(), {mixed: 0.7}) == BASELINE
    together = BASELINE.replace(num_parallel_calls=12, data_threads=24)
    assert combination(space_of(PARALLEL_SPACE), {together: 0.7}) == together


def test_what_was_raised_is_raised_further():
    """Batch size and steps per call that stand above the baseline's go to the next choice, others stay."""
    space = space_of()
    raised = BASELINE.replace(batch_size=128, steps_per_execution=8, jit_compile=True)
    assert pushed(space, raised) == raised.replace(batch_size=256)
    lowered = BASELINE.replace(batch_size=16, jit_compile=True)
    assert pushed(space, lowered) == lowered
    assert pushed(space, BASELINE) == BASELINE


def test_both_numbers_are_raised_together():
    """Where both stand above the baseline's, both climb in one step."""
    found = pushed(shipped("quick"), BASELINE.replace(batch_size=64, steps_per_execution=4))
    assert changes([found]) == [{"batch_size": 128, "steps_per_execution": 8}]


def test_at_the_top_of_the_space_nothing_can_be_raised():
    """The same configuration comes back: also where the knob does not vary at all."""
    top = BASELINE.replace(batch_size=512)
    assert pushed(space_of(), top) == top
    assert pushed(space_of(PARALLEL_SPACE), top) == top
