"""The search, on simulated trials."""

import pytest
from optuna.trial import TrialState
from simulated_runs import (
    BASELINE,
    GROWING_SPACE,
    SMALL_SPACE,
    Watcher,
    a_plan,
    a_record,
    faster_by,
    run_on,
    simulated_trials,
    space_of,
)

from autotune.measure.deciding import FEWEST_PAIRS
from autotune.space.configuration import Configuration
from autotune.study.progress import TrialBegan
from autotune.study.sampler import Sampler
from autotune.study.search import Search
from autotune.study.side_by_side import SideBySide
from autotune.trial.live import TrialFailed
from autotune.trial.record import Outcome, Pairing, Phase

LONG = a_plan(probes_end=1500.0, sampling_ends=3000.0, search_ends=3600.0)
TINY_SPACE = """
schema_version = 1
[knobs.jit_compile]
kind = "categorical"
choices = [false, true]
[knobs.steps_per_execution]
kind = "categorical"
choices = [1, 8]
"""


class Searched:
    """A search that has ended, and what it left."""

    def __init__(
        self, tmp_path, trials, *, space=SMALL_SPACE, plan=LONG, most_trials=None, earlier=(), **settings
    ):
        trials.open()
        self.watcher = settings.pop("observe", Watcher())
        self.run = run_on(trials, tmp_path, observe=self.watcher, **settings)
        beside = SideBySide(self.run)
        beside.start_baseline(60.0)
        self.run.records.update({each.trial: each for each in earlier})
        resolved = space_of(space, baseline=self.run.baseline, examples=trials.examples)
        sampler = Sampler(resolved, file=None, name="test", seed=0)
        search = Search(self.run, beside, resolved, sampler, plan, most_trials=most_trials)
        self.ended_by_itself = search.search()
        self.finalists = search.finalists()
        self.records = list(self.run.records.values())
        self.study = sampler._study
        self.launched = [each.configuration for each in trials.launched]

    def of(self, phase):
        """The records of one phase."""
        return [each for each in self.records if each.phase is phase]

    def outcomes(self):
        """Outcomes by batch size."""
        return {each.configuration["batch_size"]: each.outcome for each in self.records}


def test_probes_come_first_then_their_combination_then_samples(tmp_path):
    """Single changes, then all that helped in one, then what the sampler proposes."""
    found = Searched(tmp_path, simulated_trials(faster_by(jit_compile=1.3, steps_per_execution=1.2)))
    phases = [each.phase for each in found.records]
    assert phases == sorted(phases, key=list(Phase).index)
    first = found.of(Phase.SEARCH)[0]
    assert first.configuration["jit_compile"] is True
    assert first.configuration["steps_per_execution"] == 8
    assert found.ended_by_itself


def test_the_planted_best_is_the_first_finalist(tmp_path):
    """Two knobs help and one hurts: the leader has both and not the third."""
    speed = faster_by(jit_compile=1.4, steps_per_execution=1.2, batch_size=0.7)
    found = Searched(tmp_path, simulated_trials(speed, noise=0.05))
    best = found.finalists[0].configuration
    assert (best["jit_compile"], best["steps_per_execution"], best["batch_size"]) == (True, 8, 32)


def test_finalists_were_measured_and_faster(tmp_path):
    """What failed, what was given up, and what was slower than the baseline is not confirmed."""
    crashes = TrialFailed(Outcome.CRASHED, "killed by SIGSEGV")
    trials = simulated_trials(
        faster_by(jit_compile=1.5, batch_size=0.5),
        noise=0.05,
        failure=lambda each: crashes if each["steps_per_execution"] == 8 else None,
    )
    found = Searched(tmp_path, trials)
    assert found.finalists
    for each in found.finalists:
        assert each.outcome is Outcome.OK
        assert each.speedup.value > 1
        assert each.configuration["steps_per_execution"] == 1
        assert each.trial != 0


def test_samples_that_cannot_win_cost_little(tmp_path):
    """How much pairs vary is known from the trials before: far below the best, two or three pairs are enough."""
    speed = faster_by(jit_compile=3.0, batch_size=0.5)
    found = Searched(tmp_path, simulated_trials(speed, noise=0.1), plan=a_plan(measured=10.0))
    given_up = [each for each in found.of(Phase.SEARCH) if each.outcome is Outcome.PRUNED]
    assert given_up
    assert max(len(each.pairs) for each in given_up) <= 3
    assert all(each.configuration["batch_size"] != 32 for each in given_up)


def test_what_is_behind_is_measured_briefly_and_can_still_be_confirmed(tmp_path):
    """A little slower than the best, it is let go early, but it is no pruned trial."""
    speed = faster_by(jit_compile=1.5, batch_size=0.9)
    found = Searched(tmp_path, simulated_trials(speed, noise=0.1), plan=a_plan(measured=10.0))
    behind = [each for each in found.of(Phase.SEARCH) if each.stopped_by == "behind"]
    assert behind
    assert {each.outcome for each in behind} == {Outcome.OK}
    assert min(len(each.pairs) for each in behind) == FEWEST_PAIRS
    assert {each.trial for each in behind} & {each.trial for each in found.finalists}


def test_no_configuration_gets_two_trials(tmp_path):
    """However often the sampler proposes it: one trial, and more slices for the leaders."""
    found = Searched(tmp_path, simulated_trials(faster_by(jit_compile=1.3), noise=0.1), space=TINY_SPACE)
    configurations = [tuple(sorted(each.configuration.items(), key=str)) for each in found.records]
    assert len(set(configurations)) == len(configurations) == 4
    assert max(each.instances for each in found.records[1:]) > 1


def test_a_second_look_goes_to_the_one_that_is_less_known(tmp_path):
    """Two of which either may be the faster are measured alike: the leader is not looked at again and again."""

    def speed(configuration):
        gains = {(True, 1): 1.5, (False, 8): 1.35}
        return 4000.0 * gains.get((configuration["jit_compile"], configuration["steps_per_execution"]), 1.0)

    found = Searched(tmp_path, simulated_trials(speed, noise=0.1), space=TINY_SPACE)
    first, second = (each for each in found.records if (each.speedup and each.speedup.value > 1.3))
    assert first.instances + second.instances > 6
    assert abs(len(first.pairs) - len(second.pairs)) <= max(len(first.pairs), len(second.pairs)) / 3


@pytest.mark.parametrize("share", [30.0, 60.0])
def test_second_looks_take_no_more_than_their_share(tmp_path, share):
    """Where the user's limit ends the sampling early, what they leave is the confirmation's."""
    plan = a_plan(probes_end=300.0, sampling_ends=700.0 - share, search_ends=700.0)
    found = Searched(tmp_path, simulated_trials(noise=0.1), space=TINY_SPACE, plan=plan, most_trials=2)
    assert len(found.watcher.of(TrialBegan)) > 3, "the case is another one: no second look"
    assert found.run.clock() < share + 25.0


def test_a_small_space_ends_the_search_early(tmp_path):
    """When nothing new comes, the time that is left goes to the confirmation."""
    found = Searched(tmp_path, simulated_trials(), space=TINY_SPACE)
    assert found.ended_by_itself
    assert found.run.clock() < LONG.search_ends / 2


def test_every_trial_is_told_to_the_study(tmp_path):
    """The baseline, probes and samples are all in the Optuna study, none left running."""
    found = Searched(tmp_path, simulated_trials(noise=0.1), most_trials=12)
    numbers = {trial.user_attrs["trial"] for trial in found.study.trials}
    assert numbers == {each.trial for each in found.records}
    assert {trial.state.name for trial in found.study.trials} <= {"COMPLETE", "PRUNED"}
    assert found.study.trials[0].value == 1.0


@pytest.mark.parametrize("most", [1, 4, 9])
def test_the_users_limit_on_trials_holds(tmp_path, most):
    """So many trials and no more, the baseline not counted."""
    found = Searched(tmp_path, simulated_trials(noise=0.1), most_trials=most)
    assert len(found.records) == most + 1


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_the_search_ends_in_time(tmp_path, noise):
    """A trial is begun only if one of usual length would end in time."""
    plan = a_plan()
    found = Searched(tmp_path, simulated_trials(noise=noise, examples=None), plan=plan)
    assert plan.search_ends - 30.0 < found.run.clock() < plan.search_ends + 5.0


def test_one_probe_is_run_however_small_the_probes_share(tmp_path):
    """A search with time for a trial has one."""
    found = Searched(tmp_path, simulated_trials(noise=0.1), plan=a_plan(probes_end=0.0, sampling_ends=0.0))
    assert [each.phase for each in found.records] == [Phase.BASELINE, Phase.PROBE]


ONEDNN_SPACE = (
    TINY_SPACE
    + """
[knobs.onednn]
kind = "categorical"
choices = [true, false]
"""
)


@pytest.mark.parametrize(("import_seconds", "tried"), [(1000.0, False), (4.0, True)])
def test_what_needs_an_import_that_the_time_does_not_hold_is_not_tried(tmp_path, import_seconds, tried):
    """No trial is made for it, neither as a probe nor as a sample; the rest of the space is searched."""
    plan = a_plan(import_seconds=import_seconds)
    found = Searched(tmp_path, simulated_trials(noise=0.02), space=ONEDNN_SPACE, plan=plan)
    assert any(each.configuration["onednn"] is False for each in found.records) is tried
    assert found.ended_by_itself
    assert {each.outcome for each in found.records} <= {Outcome.OK, Outcome.PRUNED}
    assert not [each for each in found.study.trials if each.state is TrialState.RUNNING]


def test_a_search_whose_time_is_up_leaves_its_finalists(tmp_path):
    """The last moment comes in the middle of a trial: what was measured before is there."""
    speed = faster_by(jit_compile=1.5, steps_per_execution=1.2)
    plan = a_plan(search_last=40.0)
    found = Searched(tmp_path, simulated_trials(speed, noise=0.1), plan=plan)
    assert found.run.clock() <= 40.0 + 1.0
    assert found.finalists
    assert found.ended_by_itself


def test_failures_do_not_end_the_search(tmp_path):
    """Crashes and timeouts are results like others; what comes after them is measured."""

    def failure(configuration):
        if configuration["jit_compile"]:
            return TrialFailed(Outcome.TIMEOUT, "hangs")
        if configuration["steps_per_execution"] == 8:
            return TrialFailed(Outcome.CRASHED, "killed by SIGSEGV")
        return None

    found = Searched(tmp_path, simulated_trials(faster_by(batch_size=1.5), noise=0.05, failure=failure))
    outcomes = {each.outcome for each in found.records}
    assert {Outcome.OK, Outcome.TIMEOUT, Outcome.CRASHED} <= outcomes
    assert found.ended_by_itself
    assert found.finalists[0].speedup.value == pytest.approx(1.5, rel=0.1)


# --------------------------------------------------------------------------------------------- out of memory


def fits_up_to(largest):
    """Memory for the baseline and one more trial of this batch size."""
    return lambda alive: sum(each.batch_size for each in alive) <= BASELINE.batch_size + largest


def test_the_batch_size_is_doubled_until_memory_ends(tmp_path):
    """Sizes above the baseline's are tried in turn, and none beyond the first that runs out of memory."""
    trials = simulated_trials(
        lambda each: 4000.0 * each.batch_size**0.1,
        examples=1 << 20,
        fits_together=fits_up_to(200),
        start_seconds=0.1,
    )
    found = Searched(tmp_path, trials, space=GROWING_SPACE, most_trials=8)
    probed = [each.configuration["batch_size"] for each in found.of(Phase.PROBE)]
    assert {64, 128, 256} <= set(probed)
    assert found.outcomes()[256] is Outcome.OOM
    assert max(probed) == 256


def test_sizes_are_doubled_where_the_probes_have_used_up_their_time(tmp_path):
    """They have a limit of their own: that of what is sampled."""
    trials = simulated_trials(lambda each: 4000.0 * each.batch_size**0.3, examples=1 << 20, start_seconds=0.1)
    plan = a_plan(probes_end=1.0, sampling_ends=3000.0, search_ends=3600.0)
    found = Searched(tmp_path, trials, space=GROWING_SPACE, plan=plan, most_trials=6)
    probed = [each.configuration["batch_size"] for each in found.of(Phase.PROBE)]
    assert {64, 128, 256} <= set(probed)


def test_doubling_ends_after_two_sizes_that_are_no_faster(tmp_path):
    """Those that were probed before count as well, and the baseline is what they are held against first."""
    trials = simulated_trials(faster_by(batch_size=0.8), examples=1 << 20, noise=0.01, start_seconds=0.1)
    found = Searched(tmp_path, trials, space=GROWING_SPACE, most_trials=10)
    assert {each.configuration["batch_size"] for each in found.of(Phase.PROBE)} == {32, 64, 128}


def test_a_probed_size_that_ran_out_of_memory_ends_the_doubling(tmp_path):
    """The size above it is not even written down: it would take one of the trials."""
    fits = lambda alive: sum(each.batch_size for each in alive) <= 100  # noqa: E731
    trials = simulated_trials(examples=1 << 20, fits_together=fits, start_seconds=0.1)
    found = Searched(tmp_path, trials, space=GROWING_SPACE, most_trials=4)
    assert found.outcomes()[128] is Outcome.OOM
    assert {each.configuration["batch_size"] for each in found.of(Phase.PROBE)} == {32, 64, 128}


@pytest.mark.parametrize("best", [128, 256])
def test_numbers_are_raised_only_while_that_helps(tmp_path, best):
    """What helped was probed; the next size is slower, and the one after it is not what the search looks at first."""

    def speed(configuration):
        size = int(configuration["batch_size"])
        return 4000.0 * (size / 32 if size <= best else 0.7)

    space = SMALL_SPACE.replace("high = 512", "high = 4096")
    trials = simulated_trials(speed, examples=1 << 20, noise=0.01)
    found = Searched(tmp_path, trials, space=space, most_trials=40)
    search = found.of(Phase.SEARCH)
    begins = [each.configuration["batch_size"] for each in search[:3]]
    assert begins[: {128: 1, 256: 2}[best]] == {128: [256], 256: [256, 512]}[best]
    climbed = [each.configuration for each in search if each.trial <= search[0].trial + 2]
    assert {"jit_compile": False, "steps_per_execution": 1, "batch_size": 4 * best} not in [
        {name: each[name] for name in ("jit_compile", "steps_per_execution", "batch_size")}
        for each in climbed
    ]


def test_what_keras_decides_by_itself_is_a_choice_like_any_other(tmp_path):
    """`"auto"` in a search space is measured as what it comes to, and is no failure."""
    space = TINY_SPACE.replace("[false, true]", '[false, true, "auto"]')
    found = Searched(tmp_path, simulated_trials(noise=0.02), space=space, most_trials=12)
    autos = [each for each in found.records if each.configuration["jit_compile"] == "auto"]
    assert autos
    assert {each.outcome for each in autos} <= {Outcome.OK, Outcome.PRUNED}


@pytest.mark.parametrize("together", [True, False])
def test_a_model_that_falls_back_from_xla_is_not_measured_as_if_it_did_not(tmp_path, together):
    """Beside the baseline, and alone where memory does not hold both."""
    trials = simulated_trials(
        noise=0.02, xla_falls_back=True, fits_together=lambda alive: together or len(alive) < 2
    )
    found = Searched(tmp_path, trials, space=TINY_SPACE, most_trials=6)
    compiled = [each for each in found.records if each.configuration["jit_compile"] is True]
    assert compiled
    assert {each.outcome for each in compiled} == {Outcome.ERROR}
    assert all("falls back to false" in each.reason for each in compiled)
    assert any(each.outcome is Outcome.OK for each in found.records[1:])


def test_no_sample_stays_open_when_the_search_is_interrupted(tmp_path):
    """Also where that happens in a second look at what the sampler proposed again."""
    for count in range(4, 24):
        trials = simulated_trials(faster_by(jit_compile=1.3), noise=0.1)
        found = interrupted_after(trials, tmp_path / str(count), count, space=TINY_SPACE)
        assert not [each for each in found.study.trials if each.state is TrialState.RUNNING]


def test_what_needs_more_than_what_failed_is_not_run(tmp_path):
    """Larger than a batch size that ran out of memory: inferred, without a process."""
    trials = simulated_trials(examples=1 << 20, fits_together=fits_up_to(100), start_seconds=0.1)
    found = Searched(tmp_path, trials, space=GROWING_SPACE)
    inferred = [each for each in found.records if each.outcome is Outcome.INFERRED_OOM]
    assert inferred
    for each in inferred:
        assert each.instances == 0
        assert each.reason
        assert Configuration(each.configuration) not in found.launched


# -------------------------------------------------------------------------------------------- interruptions


def interrupted_after(trials, tmp_path, count, **settings):
    """A search that is interrupted when so many candidates have begun."""
    watcher = Watcher()

    def interruptions():
        return int(len(watcher.of(TrialBegan)) > count)

    return Searched(tmp_path, trials, observe=watcher, interruptions=interruptions, **settings)


@pytest.mark.parametrize(("pairing", "tried"), [(Pairing.ALTERNATING, True), (Pairing.BRACKETED, False)])
def test_what_ran_out_of_memory_only_beside_the_baseline_says_nothing_of_what_is_larger(
    tmp_path, pairing, tried
):
    """It may fit alone, and so may the larger ones; one that was tried alone tells."""
    late = a_record(
        BASELINE.replace(batch_size=64), trial=99, phase=Phase.SEARCH, outcome=Outcome.OOM, pairing=pairing
    )
    found = Searched(tmp_path, simulated_trials(faster_by(jit_compile=1.3)), earlier=[late])
    larger = [BASELINE.replace(batch_size=size) for size in (128, 256, 512)]
    outcomes = [each.outcome for each in found.records if Configuration(each.configuration) in larger]
    assert outcomes
    assert (Outcome.INFERRED_OOM not in outcomes) is tried


def test_an_interruption_ends_the_search_and_keeps_what_there_is(tmp_path):
    """The trial that runs is kept as interrupted; the ones before it can be confirmed."""
    found = interrupted_after(simulated_trials(faster_by(jit_compile=1.5), noise=0.1), tmp_path, 4)
    assert not found.ended_by_itself
    assert found.records[-1].outcome is Outcome.INTERRUPTED
    assert [each.outcome for each in found.records[:-1]] == [Outcome.OK] * 4
    assert found.finalists[0].configuration["jit_compile"] is True


def test_an_interruption_before_the_first_candidate_leaves_nothing_to_confirm(tmp_path):
    """Only the baseline was measured, and that is no finalist."""
    found = interrupted_after(simulated_trials(), tmp_path, 0)
    assert not found.ended_by_itself
    assert [each.phase for each in found.records] == [Phase.BASELINE]
    assert found.finalists == []
