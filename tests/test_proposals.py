"""Which configuration is tried next: neighbours of the fastest, the usually best first, then the sampler's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState
from simulated_runs import BASELINE, GROWING_SPACE, SMALL_SPACE, a_record, space_of

from autotune.space.probes import near
from autotune.space.space_file import find_search_space
from autotune.tuning.candidates import Others, Proposals, Sampler, neighbours, waits_for_input

TINY_SPACE = """
schema_version = 1
[knobs.jit_compile]
kind = "categorical"
choices = [false, true]
[knobs.precision]
kind = "categorical"
choices = ["float32", "mixed_bfloat16"]
"""
INPUT = {"num_parallel_calls", "data_threads", "prefetch"}


def shipped(name):
    """A shipped search space, resolved for the simulated machine."""
    written = find_search_space(name)
    return written.resolve(baseline=BASELINE, device="cpu", cores=2, examples=1437, dataset_takes_config=True)


def proposals_in(space):
    """Proposals of a new study, and the study."""
    sampler = Sampler(space, file=None, name="test", seed=0)
    return Proposals(space, sampler), sampler


def changes(space, best=BASELINE, tried=(), **how):
    """How the neighbours of the best differ from it, in order."""
    return [each.differences(best) for each in neighbours(best, {BASELINE, *tried}, space, **how)]


def test_a_larger_batch_with_more_steps_per_execution_comes_first():
    found = changes(shipped("quick"))
    assert [set(each) for each in found[:2]] == [{"batch_size", "steps_per_execution"}] * 2
    assert [each["batch_size"] for each in found[:2]] == [128, 64]
    alone = [next(iter(each)) for each in found if len(each) == 1]
    assert alone.index("persistent_iterator") < alone.index("jit_compile") < alone.index("precision")


def test_input_knobs_come_before_all_other_single_changes_where_it_waits_for_input():

    def place(waits):
        found = changes(shipped("quick"), waits=waits)
        first = next(index for index, each in enumerate(found) if set(each) & INPUT)
        assert {"num_parallel_calls", "data_threads"} <= set(found[first])
        return first - next(index for index, each in enumerate(found) if "jit_compile" in each)

    assert place(True) < 0 < place(False)


@pytest.mark.parametrize(
    ("known", "others", "waits"), [(0.5, None, True), (None, 0.5, True), (0.0, 0.5, False), (None, 0.0, False)]
)
def test_a_wait_for_input_is_the_fastest_trials_own_or_else_the_latest_others(known, others, waits):
    best, beside = (
        a_record(BASELINE, speedup=1.1).model_copy(update={"input_wait_fraction": share}) for share in (known, others)
    )
    assert waits_for_input(best, [beside]) is waits


def test_steps_per_execution_are_not_raised_first_where_steps_are_long():
    found = changes(shipped("quick"), short_steps=False)
    assert set(found[0]) == {"batch_size"}
    assert "steps_per_execution" not in {name for each in found[:4] for name in each}


def test_what_is_faster_is_changed_further():
    best = BASELINE.replace(batch_size=128)
    found = changes(space_of(), best, {best, BASELINE.replace(jit_compile=True)})
    assert found[0] == {"batch_size": 256}
    assert found.index({"jit_compile": True}) > found.index({"steps_per_execution": 8})
    top = BASELINE.replace(batch_size=512)
    assert {"batch_size": 256} in changes(space_of(), top, {top})


def test_values_that_are_no_choice_are_not_proposed():
    narrow = space_of(SMALL_SPACE.replace("512", "64"))
    assert {each["batch_size"] for each in changes(narrow) if "batch_size" in each} <= {16, 64}
    assert all(type(each["jit_compile"]) is bool for each in changes(narrow) if "jit_compile" in each)
    assert not any("precision" in each or "prefetch" in each for each in changes(narrow))


def test_knobs_that_nothing_is_known_of_are_tried_last():
    found = changes(shipped("cpu"))
    named = {"intra_op_threads", "inter_op_threads", "onednn", "deterministic"}
    places = [index for index, each in enumerate(found) if set(each) & named]
    assert {name for index in places for name in found[index]} == named
    assert places == list(range(len(found) - len(places), len(found)))


@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(["quick", "cpu"]))
def test_neighbours_are_new_and_in_the_space(data, waits, short_steps, name):
    space = shipped(name)
    drawn = st.fixed_dictionaries({name: st.sampled_from(choices) for name, choices in space.choices.items()})
    configurations = drawn.map(space.configuration)
    best = data.draw(configurations)
    tried = {BASELINE, best, *data.draw(st.lists(configurations, max_size=5))}
    tried |= set(list(neighbours(best, tried, space, waits=waits))[: data.draw(st.integers(0, 6))])
    found = list(neighbours(best, tried, space, waits=waits, short_steps=short_steps))
    assert len(set(found)) == len(found)
    assert not set(found) & tried
    assert all(each in space for each in found)


def told(sampler):
    """Of each state, how many trials the study has."""
    states = [each.state for each in sampler._study.trials]
    return {each: states.count(each) for each in set(states)}


def test_all_of_a_small_space_is_proposed_once_and_then_it_is_exhausted():
    space = space_of(TINY_SPACE)
    proposals, sampler = proposals_in(space)
    tried = {BASELINE}
    while (proposed := proposals.next(tried, BASELINE)) is not None:
        asked, configuration = proposed
        assert configuration not in tried
        tried.add(configuration)
        sampler.tell(asked, a_record(configuration, speedup=1.1))
    assert len(tried) == 4
    assert proposals.exhausted
    assert told(sampler)[TrialState.COMPLETE] == 3
    assert TrialState.RUNNING not in told(sampler)


def test_after_its_neighbours_the_sampler_proposes():
    space = space_of(GROWING_SPACE, examples=1 << 14)
    proposals, sampler = proposals_in(space)
    tried = {BASELINE, *neighbours(BASELINE, {BASELINE}, space)}
    asked, configuration = proposals.next(tried, BASELINE)
    assert configuration not in tried
    assert configuration in space
    sampler.tell(asked, a_record(configuration, speedup=1.1))
    assert not proposals.exhausted


def test_what_the_time_does_not_hold_is_passed_over_and_the_space_is_not_exhausted():
    space = space_of(TINY_SPACE)
    proposals, sampler = proposals_in(space)
    needs_import = lambda each: each["jit_compile"]  # noqa: E731  # a word
    tried = {BASELINE}
    asked, configuration = proposals.next(tried, BASELINE, passes_over=needs_import)
    assert not configuration["jit_compile"]
    sampler.tell(asked, a_record(configuration, speedup=1.1))
    tried.add(configuration)
    assert proposals.next(tried, BASELINE, passes_over=needs_import) is None
    assert proposals.nothing_fits
    assert not proposals.exhausted
    assert TrialState.RUNNING not in told(sampler)


@pytest.mark.parametrize("short", [True, False])
def test_more_steps_per_execution_are_tried_first_where_steps_are_short(short):
    proposals, _ = proposals_in(space_of())
    _, configuration = proposals.next({BASELINE}, BASELINE, short_steps=short)
    assert (configuration["steps_per_execution"] > 1) is short


class Repeating:
    """A sampler that has one idea."""

    def ask(self):
        """The baseline, again and again."""
        return None, BASELINE

    def ask_for(self, configuration):
        """Nothing to be told about it."""

    def pass_over(self, asked):
        """It learns nothing."""


def test_given_configurations_come_before_the_neighbours_unless_they_were_tried():
    space = space_of()
    first = [BASELINE.replace(batch_size=16, steps_per_execution=8), BASELINE, BASELINE.replace(batch_size=512)]
    tried, proposed = {BASELINE}, []
    proposals = Proposals(space, Sampler(space, file=None, name="test", seed=0), first=first)
    for _ in range(3):
        asked, configuration = proposals.next(tried, BASELINE)
        assert asked.params == {name: configuration[name] for name in space.choices}
        tried.add(configuration)
        proposed.append(configuration)
    assert proposed[:2] == [first[0], first[2]]
    assert proposed[2] in neighbours(BASELINE, {BASELINE, *proposed[:2]}, space)


def test_a_sampler_that_repeats_itself_ends_no_space():
    space = space_of()
    every = {
        space.configuration({"batch_size": size, "jit_compile": jit, "steps_per_execution": steps})
        for size in space.choices["batch_size"]
        for jit in (False, True)
        for steps in (1, 8)
    }
    tried, proposals = {BASELINE}, Proposals(space, Repeating())
    while (found := proposals.next(tried, BASELINE)) is not None:
        tried.add(found[1])
    assert tried == every
    assert (proposals.exhausted, proposals.nothing_fits) == (True, False)
    other = Proposals(space, Repeating())
    assert other.next({BASELINE}, BASELINE, passes_over=lambda each: True) is None
    assert (other.exhausted, other.nothing_fits) == (False, True)


def test_changes_that_helped_on_several_seats_are_joined():
    space = space_of(SMALL_SPACE)
    proposals = Proposals(space, Sampler(space, file=None, name="test", seed=0))
    tried, ratios = {space.baseline}, {space.baseline: 0.0}
    for _ in range(4):
        _, configuration = proposals.next(tried, space.baseline)
        tried.add(configuration)
        ratios[configuration] = 0.1 if len(configuration.differences(space.baseline)) == 1 else -0.1
    helped = {}
    for each in ratios:
        if ratios[each] > 0:
            helped |= {name: each[name] for name in each.differences(space.baseline)}
    best = max(ratios, key=ratios.__getitem__)
    _, joined = proposals.next(tried, best, others=Others(running=[], ratios=ratios))
    assert joined == space.baseline.replace(**helped)
    assert len(joined.differences(space.baseline)) > 1


def test_what_runs_on_another_seat_is_taken_to_become_the_fastest():
    space = space_of(SMALL_SPACE)
    proposals = Proposals(space, Sampler(space, file=None, name="test", seed=0))
    running = BASELINE.replace(batch_size=128, steps_per_execution=8)
    others = Others(running=[running], ratios={space.baseline: 0.0})
    _, configuration = proposals.next({space.baseline, running}, space.baseline, others=others)
    assert configuration in neighbours(running, {space.baseline, running}, space)


@pytest.mark.parametrize(("number", "choice"), [(100, 256), (60, 16), (1, 16), (1000, 256)])
def test_the_nearest_choice_is_so_on_a_logarithmic_scale(number, choice):
    assert near(number)([16, 256, "autotune", True, 0], None) == choice
