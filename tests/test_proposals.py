"""Which configuration is tried next: a combination, changes by their worth, then samples."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState
from simulated_runs import BASELINE, GROWING_SPACE, SMALL_SPACE, a_record, space, space_of

from autotune.space.changes import Context, near
from autotune.space.configuration import find_conflict
from autotune.space.space_file import find_search_space
from autotune.stats.same_loss import log_examples
from autotune.tuning.beliefs import Beliefs, Expectation, Expectations, Features, Observations
from autotune.tuning.candidates import Proposals, combine, find_useful, neighbours
from autotune.tuning.sampler import Sampler

TINY_SPACE = space(jit_compile=[False, True], precision=["float32", "mixed_bfloat16"])
SHORT = Context(launch_bound=True)
LONG = Context(short_steps=False, short_epochs=False)
WAITING = Context(short_steps=False, short_epochs=False, waits_for_input=True)
AMX = Context(short_steps=False, short_epochs=False, units=frozenset({"amx_bf16"}))


def a_row(knob, change, speedup, *, spread=0.05, **fields):
    """A row for a processor."""
    return Expectation(knob=knob, change=change, device="cpu", speedup=speedup, spread=spread, source="test", **fields)


TABLE = Expectations(
    [
        a_row("precision", "mixed_bfloat16", 2.0, spread=0.3, unit="amx_bf16"),
        a_row("precision", "mixed_bfloat16", 0.6, spread=0.3, unit="none"),
        a_row("batch_size", "up", 1.1),
        a_row("batch_size", "down", 0.8),
        a_row("steps_per_execution", "up", 1.2, limit="launch"),
        a_row("jit_compile", "true", 0.9, spread=0.4),
        a_row("persistent_iterator", "true", 1.1),
        a_row("num_parallel_calls", "some", 2.0, spread=0.4, limit="input"),
        a_row("prefetch", "some", 1.2, limit="input"),
    ]
)


def shipped(name="quick"):
    """A shipped search space, resolved for the simulated machine."""
    written = find_search_space(name)
    return written.resolve(baseline=BASELINE, device="cpu", cores=2, examples=1437, dataset_takes_config=True)


class Trying:
    """Proposals of a new study, and what is known of those that were tried."""

    def __init__(self, space, context=SHORT, *, first=(), table=TABLE, over_critical=0.0):
        self.space, self.context = space, context
        self.sampler = Sampler(space, file=None, name="test", seed=0)
        self.proposals = Proposals(space, self.sampler, first=first, table=table)
        self.ratios, self.failed, self.running = {space.baseline: 0.0}, [], []
        self.over_critical = over_critical

    def next(self, **how):
        """The next configuration, or None; it is not tried yet."""
        best = max(self.ratios, key=self.to_the_same_loss)
        observations = Observations(
            ratios=self.ratios, failed=self.failed, running=self.running, over_critical=self.over_critical
        )
        tried = {*self.ratios, *self.failed, *self.running}
        how = {"context": self.context, "observations": observations, **how}
        found = self.proposals.next(tried, best, **how) or self.proposals.next(tried, best, last=True, **how)
        self.optuna_trial = None if found is None else found[0]
        return None if found is None else found[1]

    def to_the_same_loss(self, configuration):
        """The logarithm of its speed-up, less that of the further examples that it should need."""
        more = log_examples(max(1.0, configuration.batch_size / BASELINE.batch_size), self.over_critical)
        return self.ratios[configuration] - more

    def changes(self, **how):
        """How the next one differs from the baseline."""
        return self.next(**how).differences(self.space.baseline)


BATCH_SIZES = space(batch_size=(16, 8192), jit_compile=[False, True])


def batch_sizes(critical, *, per_example):
    """The batch sizes in the order in which they are proposed, where a step takes 2 ms and a time per example."""
    trying = Trying(space_of(BATCH_SIZES, examples=1_000_000), over_critical=BASELINE.batch_size / critical, table=None)

    def step_seconds(size):
        return 0.002 + per_example * size

    found = []
    while (proposed := trying.next()) is not None:
        size = proposed.batch_size
        trying.ratios[proposed] = math.log(size / step_seconds(size) * step_seconds(32) / 32)
        found.append(size)
    return found


# ------------------------------------------------------------------------------------------------- the batch size


def test_batch_sizes_near_the_best_one_come_first():
    """The best batch size reaches a loss soonest."""
    assert set(batch_sizes(64, per_example=2e-5)[:4]) == {64, 128}  # soonest with 80
    assert batch_sizes(2000, per_example=2e-6)[:3] == [128, 512, 1024]  # with 1,414


def test_batch_sizes_far_above_the_best_one_come_late():
    """The best batch size reaches a loss soonest."""
    order = batch_sizes(64, per_example=2e-5)
    assert len(order) == 19
    assert max(order[:7]) <= 4 * 80 < min(order[7:17])
    assert order[17:] == [16, 16]  # below the baseline's


# ------------------------------------------------------------------------------------------------- the combination


def test_first_candidate_combines_hardware_and_limit():
    assert Trying(shipped(), AMX).changes() == {"batch_size": 128, "precision": "mixed_bfloat16"}
    assert Trying(shipped(), LONG).changes() == {"batch_size": 128}
    assert set(Trying(shipped(), SHORT).changes()) == {"batch_size", "steps_per_execution", "persistent_iterator"}
    waiting = Trying(shipped(), WAITING).changes()
    assert waiting.keys() >= {"batch_size", "num_parallel_calls", "data_threads", "prefetch"}
    assert not waiting.keys() & {"precision", "steps_per_execution", "persistent_iterator", "jit_compile"}


EDITS = {"cache": [False, True], "batched_map": [False, True], "keep_freed_memory": ["none", "one_arena"]}


@pytest.mark.parametrize(
    ("now", "first"),
    [
        ({"may_wait": True}, {"batched_map"}),
        ({"short_epochs": True}, {"cache"}),
        ({"may_wait": True, "faults_often": True}, {"batched_map", "keep_freed_memory"}),
        ({}, set()),
    ],
)
def test_edits_are_in_the_first_two_candidates(now, first):
    """Also beside a larger batch, and where a wait for input is known once the first trial has ended."""
    own = BASELINE.replace(**{name: values[0] for name, values in EDITS.items()})
    context = dataclasses.replace(SHORT, **{"short_epochs": False, **now})
    trying = Trying(space_of(space(batch_size=(32, 256), **EDITS), baseline=own), context, table=None)
    assert trying.changes(batch_size=32).keys() == first or not first
    known = dataclasses.replace(trying.context, waits_for_input=True, may_wait=False)
    assert trying.changes(context=known).keys() >= {"batch_size", "cache"}


def test_combination_omits_a_fixed_batch_size():
    assert Trying(space_of(TINY_SPACE), AMX).changes() == {"precision": "mixed_bfloat16"}


@pytest.mark.parametrize(("share", "batch_size"), [(0.1, 128), (0.3, 64), (0.6, None), (None, 128)])
def test_the_combination_has_no_batch_that_hardly_fits(share, batch_size):
    now = Context(short_steps=False, short_epochs=False, units=frozenset({"amx_bf16"}), memory_share=share)
    assert Trying(shipped(), now).changes().get("batch_size") == batch_size


def test_combination_omits_a_batch_size_that_is_passed_over():
    trying = Trying(shipped(), AMX)
    assert trying.changes(is_skipped=lambda found: found.batch_size >= 128) == {
        "batch_size": 64,
        "precision": "mixed_bfloat16",
    }
    assert trying.changes(is_skipped=lambda found: found.batch_size > 32) == {"precision": "mixed_bfloat16"}


def test_a_change_that_often_fails_does_not_join():
    table = Expectations([a_row("batch_size", "up", 1.1), a_row("jit_compile", "true", 2.0, failures=0.4)])
    assert Trying(shipped(), LONG, table=table).changes() == {"batch_size": 128}


def test_parts_of_a_combination_that_fails_are_tried_apart():
    trying = Trying(shipped(), AMX)
    trying.failed.append(trying.next())
    apart = trying.next()
    assert apart.differences(BASELINE) == {"precision": "mixed_bfloat16"}
    trying.ratios[apart] = 0.7
    assert trying.changes().keys() >= {"precision"}
    trying.failed += [trying.next(), BASELINE.replace(precision="mixed_bfloat16", batch_size=64)]
    assert combine(apart, trying_beliefs(trying), trying.space, AMX) == apart


def test_a_part_that_failed_alone_is_in_no_combination():
    trying = Trying(shipped(), AMX)
    trying.failed.append(BASELINE.replace(precision="mixed_bfloat16"))
    assert trying.changes() == {"batch_size": 128}


def test_disappointing_combination_blames_doubtful_parts():
    trying = Trying(shipped(), AMX)
    trying.ratios[trying.next()] = -0.3
    assert trying.changes() == {"batch_size": 128}


def test_what_is_faster_is_changed_further():
    trying = Trying(shipped(), AMX)
    best, further = trying.next(), []
    trying.ratios[best] = 0.9
    for _ in range(2):
        further.append(trying.next())
        trying.ratios[further[-1]] = 0.8
    assert [set(found.differences(best)) for found in further] == [{"jit_compile"}, {"batch_size"}]
    assert further[1].batch_size > best.batch_size


def test_changes_that_helped_apart_are_joined():
    trying = Trying(space_of(SMALL_SPACE), LONG, table=Expectations([]))
    trying.ratios |= {BASELINE.replace(jit_compile=True): 0.2, BASELINE.replace(batch_size=64): 0.2}
    assert trying.changes().items() >= {"jit_compile": True}.items()
    assert trying.changes()["batch_size"] >= 64


def trying_beliefs(trying):
    """What is believed by now."""
    observations = Observations(ratios=trying.ratios, failed=trying.failed, running=trying.running)
    return Beliefs(Features(trying.space), trying.context, TABLE, observations)


# ------------------------------------------------------------------------------------------------ single changes


def test_a_change_with_a_slow_start_comes_after_an_equal_one():
    rows = [a_row("jit_compile", "true", 1.03, start=20.0), a_row("precision", "mixed_bfloat16", 1.03, unit="amx_bf16")]
    trying = Trying(space_of(TINY_SPACE), AMX, table=Expectations(rows))
    assert trying.changes() == {"precision": "mixed_bfloat16"}


def test_knobs_that_cannot_act_are_tried_alone_only_at_the_end():
    text = TINY_SPACE + '[knobs.prefetch]\nkind = "categorical"\nchoices = [0, 2]\n'
    trying = Trying(space_of(text), LONG)
    proposed = []
    while (found := trying.next()) is not None:
        proposed.append(found.differences(BASELINE))
        trying.ratios[found] = 0.0
        trying.sampler.tell(trying.optuna_trial, a_record(found, speedup=1.0))
    assert len(proposed) == 7
    without = [{name: value for name, value in found.items() if name != "prefetch"} for found in proposed]
    assert not any(found in [{}, *without[:place]] for place, found in enumerate(without[:3]))
    assert trying.proposals.exhausted


def test_no_neighbour_changes_a_knob_that_cannot_act():
    changed = {name for found in neighbours(BASELINE, shipped("cpu"), LONG) for name in found.differences(BASELINE)}
    idle = {"prefetch", "num_parallel_calls", "data_threads", "deterministic", "steps_per_execution"}
    assert not changed & {*idle, "persistent_iterator", "data_autotune"}
    assert {"batch_size", "intra_op_threads", "onednn", "jit_compile"} <= changed


def test_values_that_are_no_choice_are_not_proposed():
    narrow = space_of(SMALL_SPACE.replace("512", "64"))
    found = [configuration.differences(BASELINE) for configuration in neighbours(BASELINE, narrow, SHORT)]
    assert {each["batch_size"] for each in found if "batch_size" in each} <= {16, 64}
    assert all(type(each["jit_compile"]) is bool for each in found if "jit_compile" in each)
    assert not any("precision" in each or "prefetch" in each for each in found)


@pytest.mark.parametrize(
    ("name", "least", "values"),
    [
        ("num_parallel_calls", {"most_calls": 3}, (0, 1, 2)),
        ("data_threads", {"most_calls": 3}, (0, 2)),
        ("prefetch", {"most_calls": 1}, None),
        ("num_parallel_calls", {"most_calls": 1}, None),
        ("intra_op_threads", {}, (0, 1, 2, 4)),
        ("inter_op_threads", {"most_threads": 2}, (0, 1, 2)),
        ("intra_op_threads", {"most_threads": 0}, None),
        ("batch_size", {}, (32, 64, 128, 256)),
        ("precision", {}, None),
        ("precision", {"units": AMX.units}, ("float32", "mixed_bfloat16")),
    ],
)
def test_what_cannot_act_or_is_hardly_ever_faster_is_not_useful(name, least, values):
    assert find_useful(shipped("cpu"), dataclasses.replace(WAITING, **least)).get(name) == values


@pytest.mark.parametrize(("context", "is_late"), [(LONG, True), (AMX, False)])
def test_what_is_hardly_ever_faster_comes_after_everything_else(context, is_late):
    """Low precision without units for it and smaller batches; after that only what cannot act."""
    precision = "".join(TINY_SPACE.partition("[knobs.precision]")[1:])
    space = space_of(SMALL_SPACE.replace("512", "64") + precision)
    trying, order = Trying(space, context, table=Expectations([])), []
    while (found := trying.next()) is not None:
        order.append(found)
        trying.ratios[found] = -0.01
        trying.sampler.tell(trying.optuna_trial, a_record(found, speedup=0.99))
    assert len(order) == trying.space.size - 1 == 23
    low = [place for place, found in enumerate(order) if found["precision"] != "float32" and found.batch_size >= 32]
    usual = [found["steps_per_execution"] == 1 and found.batch_size >= 32 for found in order]
    assert (low[0] > 2) is is_late
    assert all(usual[: 3 if is_late else 7])
    assert not any(usual[11:])


@pytest.mark.parametrize("context", [LONG, AMX, WAITING])
def test_a_larger_batch_is_the_first_or_second_candidate(context):
    """However little the expectations promise of it."""
    table = Expectations([a_row("batch_size", "up", 0.9), a_row("precision", "mixed_bfloat16", 2.0, unit="amx_bf16")])
    for share, size in ((None, 128), (0.3, 64)):
        trying = Trying(shipped(), dataclasses.replace(context, memory_share=share), table=table)
        first = trying.next()
        trying.ratios[first] = 0.4
        assert size in (first.batch_size, trying.next().batch_size)


@pytest.mark.parametrize("context", [SHORT, dataclasses.replace(SHORT, units=AMX.units)])
def test_no_sample_has_what_cannot_act_or_is_hardly_ever_faster(context):
    trying = Trying(shipped(), context)
    useful = find_useful(trying.space, context)
    for _ in range(22):
        found = trying.next()
        assert all(value in useful.get(name, ()) for name, value in found.differences(BASELINE).items())
        trying.ratios[found] = -0.01
        trying.sampler.tell(trying.optuna_trial, a_record(found, speedup=0.99))


@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(["quick", "cpu"]))
def test_proposals_are_new_and_in_the_space(data, waits, short_steps, name):
    space = shipped(name)
    drawn = st.fixed_dictionaries({name: st.sampled_from(choices) for name, choices in space.choices.items()})
    configurations = st.lists(drawn.map(space.configuration), max_size=5)
    trying = Trying(space, Context(waits_for_input=waits, short_steps=short_steps))
    trying.ratios |= dict.fromkeys(data.draw(configurations), data.draw(st.floats(-1.0, 1.0)))
    trying.failed = [each for each in data.draw(configurations) if each not in trying.ratios]
    trying.running = [each for each in data.draw(configurations) if each not in {*trying.ratios, *trying.failed}]
    found = trying.next()
    assert found not in {*trying.ratios, *trying.failed, *trying.running}
    assert found in space
    assert not find_conflict(found)


# ------------------------------------------------------------------------------------------------------ samples


def told(sampler):
    """Of each state, how many trials the study has."""
    states = [trial.state for trial in sampler._study.trials]
    return {each: states.count(each) for each in set(states)}


def test_small_space_is_proposed_once_and_then_exhausted():
    trying = Trying(space_of(TINY_SPACE))
    while (configuration := trying.next()) is not None:
        assert configuration not in trying.ratios
        trying.ratios[configuration] = 0.1
        trying.sampler.tell(trying.optuna_trial, a_record(configuration, speedup=1.1))
    assert len(trying.ratios) == 4
    assert trying.proposals.exhausted
    assert told(trying.sampler)[TrialState.COMPLETE] == 3
    assert TrialState.RUNNING not in told(trying.sampler)


def test_where_no_change_is_promising_samples_are_proposed():
    trying = Trying(space_of(GROWING_SPACE, examples=1 << 14))
    trying.ratios |= dict.fromkeys(neighbours(BASELINE, trying.space, SHORT), -3.0)
    configuration = trying.next()
    assert configuration not in trying.ratios
    assert configuration in trying.space
    trying.sampler.tell(trying.optuna_trial, a_record(configuration, speedup=1.1))
    assert not trying.proposals.exhausted


def test_the_first_samples_follow_the_expectations():
    trying = Trying(shipped(), AMX)
    beliefs = trying_beliefs(trying)
    useful = find_useful(trying.space, AMX)
    drawn = [beliefs.draw(random.Random(seed), BASELINE, useful) for seed in range(40)]
    assert sum(each["precision"] == "mixed_bfloat16" for each in drawn) > 30
    assert sum(each.batch_size > 32 for each in drawn) > 30
    assert len({each["jit_compile"] for each in drawn}) == 2
    assert {each["prefetch"] for each in drawn} == {0}


def test_lack_of_time_does_not_exhaust_the_space():
    trying = Trying(space_of(TINY_SPACE))
    needs_import = lambda configuration: configuration["jit_compile"]  # noqa: E731  # a word
    configuration = trying.next(is_skipped=needs_import)
    assert not configuration["jit_compile"]
    trying.sampler.tell(trying.optuna_trial, a_record(configuration, speedup=1.1))
    trying.ratios[configuration] = 0.1
    assert trying.next(is_skipped=needs_import) is None
    assert trying.proposals.nothing_fits
    assert not trying.proposals.exhausted
    assert TrialState.RUNNING not in told(trying.sampler)


class Repeating:
    """A sampler that has one idea."""

    def ask(self):
        """The baseline, again and again."""
        return None, BASELINE

    def ask_for(self, configuration):
        """Nothing to be told about it."""

    def skip_sample(self, optuna_trial):
        """It learns nothing."""


def test_given_configurations_precede_neighbours_unless_tried():
    space = space_of()
    first = [BASELINE.replace(batch_size=16, steps_per_execution=8), BASELINE, BASELINE.replace(batch_size=512)]
    tried, proposed = {BASELINE}, []
    proposals = Proposals(space, Sampler(space, file=None, name="test", seed=0), first=first)
    for _ in range(3):
        optuna_trial, configuration = proposals.next(tried, BASELINE, context=SHORT)
        assert optuna_trial.params == {name: configuration[name] for name in space.choices}
        tried.add(configuration)
        proposed.append(configuration)
    assert proposed[:2] == [first[0], first[2]]
    assert proposed[2] not in first


def test_what_was_seen_to_be_much_slower_is_not_sampled_again():
    trying = Trying(space_of(SMALL_SPACE))
    trying.ratios |= {BASELINE.replace(jit_compile=True, batch_size=size): -1.5 for size in (32, 64, 128)}
    for _ in range(5):
        configuration = trying.next()
        assert configuration["jit_compile"] is False
        trying.ratios[configuration] = -0.02
        trying.sampler.tell(trying.optuna_trial, a_record(configuration, speedup=0.98))


def test_a_sampler_that_repeats_itself_ends_no_space():
    space = space_of()
    every = {
        space.configuration({"batch_size": size, "jit_compile": jit, "steps_per_execution": steps})
        for size, jit, steps in itertools.product(space.choices["batch_size"], (False, True), (1, 8))
    }
    tried, proposals = {BASELINE}, Proposals(space, Repeating())
    for last in (False, True):
        while (found := proposals.next(tried, BASELINE, context=SHORT, last=last)) is not None:
            tried.add(found[1])
    assert tried == every
    assert (proposals.exhausted, proposals.nothing_fits) == (True, False)
    other = Proposals(space, Repeating())
    assert other.next({BASELINE}, BASELINE, context=SHORT, is_skipped=lambda configuration: True, last=True) is None
    assert (other.exhausted, other.nothing_fits) == (False, True)


@pytest.mark.parametrize(("number", "choice"), [(100, 256), (60, 16), (1, 16), (1000, 256)])
def test_the_nearest_choice_is_so_on_a_logarithmic_scale(number, choice):
    assert near(number)([16, 256, "autotune", True, 0], None) == choice
