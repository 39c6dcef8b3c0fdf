"""From what a run has found to the recipe, over whole simulated runs."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from simulated_runs import (
    BASELINE,
    Watcher,
    a_candidate,
    a_record,
    a_state,
    faster_by,
    quick_tune,
    simulated_trials,
    space,
)

from autotune.data.figures import Check, Interval
from autotune.data.options import Options
from autotune.data.record import Phase
from autotune.recipe.evidence import Watch
from autotune.recipe.recipe import Recipe
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.intervals import Spread
from autotune.stats.stability import DEVICE_MEMORY, check_falling_loss, check_finite_loss, check_peak_memory
from autotune.tuning import tune
from autotune.tuning.events import PairMeasured, TrialBegan, TrialEnded
from autotune.tuning.recommend import likely_larger_batch, recommend
from autotune.tuning.state import EXCLUDED_GAIN, Candidate

ONE_CANDIDATE = space(batch_size=[32, 128])
FAST = BASELINE.replace(batch_size=128)


def large(configuration, yes, no):
    """The first where the batch is the larger one."""
    return yes if configuration["batch_size"] == 128 else no


def retracing(configuration):
    """The larger batch breaks a rule."""
    return large(configuration, 5, 0)


def run_that_is(verdict, path, **options):
    """The recipe of a short run with this verdict, and its directory."""
    settings = {"space": ONE_CANDIDATE, "budget": 100.0, "keeps_budget": False}
    trials = {
        Verdict.FASTER: simulated_trials(faster_by(batch_size=1.5), noise=0.03),
        Verdict.NO_SIGNIFICANT_GAIN: simulated_trials(noise=0.02),
        Verdict.UNDECIDED: simulated_trials(faster_by(batch_size=1.5), noise=0.03),
        Verdict.UNSTABLE: simulated_trials(faster_by(batch_size=1.5), noise=0.03, retraces=retracing),
    }
    if verdict is Verdict.UNDECIDED:
        settings["budget"] = 18.0
    recipe, directory = quick_tune(trials[verdict], path, **settings, **options)
    assert recipe.evidence.verdict is verdict
    return recipe, directory


class Ended:
    """What `recommend` was given at the end of a run that found a gain: to be given again with changes."""

    def __init__(self, given):
        self.given = given
        self.number = given["found"].state.best_leader.number
        self.confirmation = given["found"].confirmations[self.number]
        self.records = dict(given["run"].records)

    def recipe(self, *, winner=None, reference=None, searched=None, checks=None, **changed):
        """The recipe where the records of the winner, or of the baseline, have these fields."""
        run = self.given["run"]
        changes = {self.number: winner, self.confirmation.reference.number: reference, 0: searched}
        run.records.clear()
        run.records.update(
            {number: record.model_copy(update=changes.get(number) or {}) for number, record in self.records.items()}
        )
        found = self.given["found"]
        if checks is not None:
            found = dataclasses.replace(found, checks={self.number: tuple(checks)})
        made = recommend(**{**self.given, "found": found, **changed})
        assert Recipe.parse(made.to_json(), source="again") == made
        return made

    def recipe_from(self, **changes):
        """The recipe where what is known differs so from what the run knew."""
        found = self.given["found"]
        return self.recipe(found=dataclasses.replace(found, state=dataclasses.replace(found.state, **changes)))

    def not_checked(self, **changed):
        """What the recipe lists as not checked."""
        return self.recipe(**changed).evidence.stability.not_checked


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The end of a run that found a batch of 128 to be ×1.5."""
    with pytest.MonkeyPatch.context() as patch:
        given = {}
        patch.setattr(tune, "recommend", lambda **all_: given.update(all_) or recommend(**all_))
        run_that_is(Verdict.FASTER, tmp_path_factory.mktemp("runs") / "run")
    return Ended(given)


# -------------------------------------------------------------------------------------------- the four verdicts


def test_the_confirmed_leader_is_recommended(tmp_path):
    recipe, directory = run_that_is(Verdict.FASTER, tmp_path)
    evidence = recipe.evidence
    assert recipe.configuration == dict(FAST)
    assert recipe.baseline == dict(BASELINE)
    reference, winner = (directory.trials[number] for number in evidence.confirmation.trials)
    assert reference.phase is winner.phase is Phase.CONFIRM
    assert (reference.configuration, winner.configuration) == (recipe.baseline, recipe.configuration)
    assert evidence.speedup.value == winner.speedup.value == pytest.approx(1.5, rel=0.1)
    assert evidence.speedup == winner.speedup
    assert evidence.throughput.value == winner.throughput.value
    assert evidence.baseline_throughput.value == reference.throughput.value
    assert evidence.stability.checks
    confirmation = evidence.confirmation
    assert (confirmation.pairs, confirmation.pairing, confirmation.leaders) == (len(winner.pairs), "alternating", 1)
    assert recipe.candidate is None
    assert evidence.excluded_gain is None
    assert evidence.go_on_seconds is None


@pytest.mark.parametrize(("speed", "named"), [(0.4, False), (1.0, False), (1.06, True)])
def test_only_what_looks_faster_is_a_best_candidate(tmp_path, speed, named):
    trials = simulated_trials(faster_by(batch_size=speed), noise=0.001)
    recipe, _ = quick_tune(trials, tmp_path, space=ONE_CANDIDATE, min_gain=0.2)
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
    assert (recipe.candidate is not None) is named
    assert recipe.evidence.stability.not_checked == ()


def test_a_knob_tried_only_beside_slow_changes_is_not_excluded(ended):
    """By itself, or in something that is not slow, a change shows what it gives."""

    def tried(ratio, **changes):
        return Candidate(number=1, configuration=BASELINE.replace(**changes), ratio=ratio, pairs=8)

    slow = tried(-0.5, jit_compile=True, prefetch=2)
    fair = tried(-0.04, prefetch=2, steps_per_execution=8)
    alone = tried(-0.5, jit_compile=True)
    for candidates, named in [
        ([slow], ["jit_compile", "prefetch"]),
        ([slow, fair], ["jit_compile"]),
        ([slow, alone], ["prefetch"]),
    ]:
        spread = Spread(deviation=0.001, degrees=50)
        evidence = ended.recipe_from(candidates=tuple(candidates), leaders=(), exhausted=True, spread=spread).evidence
        assert evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
        assert [gap.partition(" by itself")[0] for gap in evidence.stability.not_checked] == named


def test_knobs_that_no_time_was_left_for_are_named(tmp_path):
    trials = simulated_trials(faster_by(jit_compile=1.1), noise=0.02, start_seconds=8.0)
    wide = space(jit_compile=[False, True], precision=["float32", "mixed_bfloat16"], steps_per_execution=[1, 8, 32])
    short, whole = (
        quick_tune(trials, tmp_path / str(budget), space=wide, budget=budget)[0].evidence for budget in (60.0, 2000.0)
    )
    (gap,) = [gap for gap in short.stability.not_checked if "no time was left to try" in gap]
    assert set(gap.partition(" (")[0].split(", ")) < {"jit_compile", "precision", "steps_per_execution"}
    assert not any("no time was left" in gap for gap in whole.stability.not_checked)
    assert (short.go_on_seconds is not None, whole.go_on_seconds) == (True, None)


@pytest.mark.parametrize(("knob", "values"), [("jit_compile", [False, True]), ("batch_size", [32, 128])])
def test_fresh_processes_say_more_than_the_search(tmp_path, knob, values):
    """What looked much faster in the search alone is told with the figure of the fresh processes."""
    phases = []
    watcher = Watcher(lambda event: phases.append(event.phase) if isinstance(event, TrialBegan) else None)

    def speed(configuration):
        return 4000.0 * (1.0 if configuration[knob] == values[0] else 1.03 if Phase.CONFIRM in phases else 1.74)

    trials = simulated_trials(speed, noise=0.001)
    options = {"objective": "time_to_loss", "min_gain": 0.1, "space": space(**{knob: values})}
    recipe, _ = quick_tune(trials, tmp_path, observe=watcher, **options)
    (known,) = filter(None, (recipe.candidate, recipe.larger_batch))
    assert known.configuration[knob] == values[1]
    assert 0.95 < known.speedup.low < 1.03 < known.speedup.high < 1.1
    assert "search only" not in str(recipe.answer.choices)


@pytest.mark.parametrize(("deviation", "named"), [(0.001, True), (0.5, False)])
def test_what_looks_faster_by_chance_is_no_candidate(ended, deviation, named):
    faster = Candidate(number=1, configuration=FAST, ratio=0.2, pairs=4)
    changes = {"candidates": (faster,), "leaders": (), "spread": Spread(deviation=deviation, degrees=50)}
    recipe = ended.recipe_from(**changes)
    assert recipe.evidence.verdict is Verdict.UNDECIDED
    assert (recipe.candidate is not None) is named


def test_the_budget_to_go_on_with_is_bounded(ended):
    doubtful = Candidate(number=1, configuration=FAST, ratio=0.2, pairs=4, look_seconds=1e6)
    changes = {"candidates": (doubtful,), "leaders": (), "spread": Spread(deviation=1.0, degrees=50)}
    recipe = ended.recipe_from(**changes)
    assert recipe.evidence.go_on_seconds == 10 * ended.given["run"].options.budget


def test_larger_batches_exclude_no_gain_of_the_same_training(ended):
    larger = Candidate(number=1, configuration=FAST, ratio=0.2, pairs=4, batch_ratio=2.0)
    changes = {"candidates": (larger,), "leaders": (), "more_candidates": False}
    recipe = ended.recipe_from(**changes)
    assert (recipe.evidence.verdict, recipe.evidence.excluded_gain) == (Verdict.NO_SIGNIFICANT_GAIN, None)


def test_a_candidate_in_doubt_leaves_the_verdict_open(tmp_path):
    trials = simulated_trials(faster_by(batch_size=1.1), noise=0.2, seed=4)
    recipe = quick_tune(trials, tmp_path, space=ONE_CANDIDATE, budget=60.0)[0]
    evidence = recipe.evidence
    assert evidence.verdict is Verdict.UNDECIDED
    assert evidence.excluded_gain > EXCLUDED_GAIN
    assert recipe.candidate.speedup.high - 1 == pytest.approx(evidence.excluded_gain)
    assert "fresh processes a side" in recipe.candidate.reason


@pytest.mark.parametrize(("start_seconds", "budget"), [(1.5, 18.0), (25.0, 130.0)])
def test_undecided_run_names_leader_and_sufficient_budget(tmp_path, start_seconds, budget):

    def run(name, seconds):
        trials = simulated_trials(faster_by(batch_size=1.5), noise=0.03, start_seconds=start_seconds)
        return quick_tune(trials, tmp_path / name, space=ONE_CANDIDATE, budget=seconds)[0]

    recipe = run("short", budget)
    evidence = recipe.evidence
    assert evidence.verdict is Verdict.UNDECIDED
    assert recipe.configuration == recipe.baseline
    assert evidence.ended_by is EndedBy.BUDGET
    assert recipe.candidate.configuration == dict(FAST)
    speedup = recipe.candidate.speedup
    assert speedup.low == speedup.high == pytest.approx(1.5, rel=0.1), "only the search measured it"
    assert "before it was measured in fresh processes" in recipe.candidate.reason
    assert evidence.go_on_seconds >= 4 * start_seconds, "holds two processes a side"
    assert run("long", budget + evidence.go_on_seconds).evidence.verdict is Verdict.FASTER


def stopped_when(path, enough, *, noise=0.02):
    """The recipe of a run that the user stops once enough was seen."""
    watcher = Watcher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.tuning.run.Run.interrupted", lambda self: enough(watcher))
        trials = simulated_trials(faster_by(batch_size=1.1), noise=noise)
        recipe, _ = quick_tune(trials, path, space=ONE_CANDIDATE, observe=watcher)
    assert recipe.evidence.ended_by is EndedBy.INTERRUPTED
    assert recipe.evidence.verdict is Verdict.UNDECIDED
    assert recipe.configuration == recipe.baseline
    return recipe


def test_a_run_that_was_stopped_in_its_search_names_the_leader(tmp_path):
    recipe = stopped_when(tmp_path, lambda watcher: len(watcher.of(TrialEnded)) > 1)
    assert recipe.candidate.configuration == dict(FAST)
    assert recipe.candidate.speedup.value == pytest.approx(1.1, rel=0.1)


def test_a_confirmation_that_was_cut_off_tells_how_far_it_came(tmp_path):

    def two_processes(watcher):
        return any(pair.processes == 2 for pair in watcher.of(PairMeasured))

    recipe = stopped_when(tmp_path, two_processes, noise=0.05)
    assert recipe.evidence.confirmation.processes == 2
    assert recipe.candidate.reason.startswith("2 fresh processes a side did not decide it")
    low, high = recipe.candidate.speedup.low, recipe.candidate.speedup.high
    assert low < 1.1 < high


# --------------------------------------------------------------------------------------------- what is compared


def test_peak_memory_of_the_baseline_falls_back_to_the_search(ended):
    recipe = ended.recipe(winner={"peak_host_bytes": 5000, "peak_device_bytes": 7}, reference={"peak_host_bytes": 1100})
    peak = recipe.evidence.peak_memory_bytes
    assert (peak.host, peak.device, recipe.evidence.baseline_peak_memory_bytes.host) == (5000, 7, 1100)
    recipe = ended.recipe(reference={"peak_host_bytes": None}, searched={"peak_host_bytes": 1000})
    assert recipe.evidence.baseline_peak_memory_bytes.host == 1000


def test_the_compile_times_are_those_of_both_sides(ended):

    def side(rate, compile_seconds):
        return {"throughput": Interval(value=rate, low=rate, high=rate), "compile_seconds": compile_seconds}

    evidence = ended.recipe(winner=side(6000.0, 2.5), reference=side(4000.0, 0.5)).evidence
    assert (evidence.compile_seconds, evidence.baseline_compile_seconds) == (2.5, 0.5)


def test_throughput_objective_says_learning_was_not_measured(ended):
    rule = ended.recipe().learning_rate_rule
    assert (rule.batch_ratio, rule.factor, rule.same_loss) == (4.0, 1.0, None)
    assert rule.not_measured


def test_examples_per_epoch_prefer_observed_calls_to_the_data(ended):
    log = ended.records[ended.number].processes[-1]
    size = ended.recipe().configuration["batch_size"]

    def seen(calls):
        changed = {
            "examples_per_epoch": 10 * size - 3,
            "processes": (log.model_copy(update={"calls_per_epoch": calls}),),
        }
        return ended.recipe(winner=changed).evidence.examples_per_epoch

    steps = ended.recipe().configuration["steps_per_execution"]
    assert seen(None) == seen(-(-10 // steps)) == 10 * size - 3
    assert seen(4 * 10) == 4 * 10 * size * steps


# ---------------------------------------------------------------------------------------------- what was watched


def test_a_winner_that_fails_while_watched_is_refused(ended):
    watched = Watch(seconds=20.0, throughput=None, checks=(), failure="no memory after all")
    recipe = ended.recipe(watched=watched)
    assert (recipe.evidence.verdict, recipe.evidence.watch) == (Verdict.UNSTABLE, watched)
    assert recipe.configuration == recipe.baseline
    assert recipe.candidate.configuration == dict(FAST)
    assert "while it was watched: no memory after all" in recipe.candidate.reason


# -------------------------------------------------------------------------------------------- what was not checked


@pytest.mark.parametrize(("settled", "told"), [(True, None), (False, "steady speed"), (None, "too few steps")])
@pytest.mark.parametrize(
    ("side", "named"), [("winner", "recommendation"), ("reference", "baseline")], ids=["winner", "baseline"]
)
def test_a_steady_state_that_was_not_seen_is_not_called_a_check(ended, side, named, settled, told):
    sides = {"winner": {"settled": True}, "reference": {"settled": True}, side: {"settled": settled}}
    found = [each for each in ended.not_checked(**sides) if "steady" in each]
    assert len(found) == (told is not None)
    assert all(told in each and named in each for each in found)


def test_numerics_that_nobody_compared_are_listed(ended):
    compiled = {**ended.records[ended.number].configuration, "jit_compile": True}
    assert [each for each in ended.not_checked(winner={"configuration": compiled}) if "numerics" in each]
    assert not [each for each in ended.not_checked() if "numerics" in each]


@pytest.mark.parametrize("name", ["host_memory_growth", "device_memory_growth"])
@pytest.mark.parametrize(("value", "listed"), [(1.0, False), (None, True)])
def test_a_leak_of_nobody_knows_whom_is_not_called_a_check(ended, name, value, listed):
    grown = Check(name=name, passed=True, value=value, limit=2.0, detail="it grows")
    found = [each for each in ended.not_checked(checks=[grown]) if "leaks memory" in each]
    assert [name.replace("_", " ") in each for each in found] == [True] * listed


def test_a_check_that_could_not_be_made_did_not_pass(ended):
    none = [check_finite_loss([None, None]), check_falling_loss(None, None, baseline_first=None, baseline_last=None)]
    fits = check_peak_memory(DEVICE_MEMORY, 1 << 30, 1 << 34)
    stability = ended.recipe(checks=[*none, fits]).evidence.stability
    assert [check.name for check in stability.checks] == [DEVICE_MEMORY]
    assert "a finite training loss (the model reports no loss)" in stability.not_checked
    assert "whether the training loss falls (the model reports no loss)" in stability.not_checked


@pytest.mark.parametrize("checks", [(), (check_peak_memory(DEVICE_MEMORY, 1 << 30, 1 << 34),)])
@pytest.mark.parametrize("peak", [None, 1 << 30])
def test_what_nobody_looked_at_on_a_device_is_said(ended, checks, peak):
    found = ended.not_checked(winner={"peak_device_bytes": peak}, checks=checks)
    assert any("throttling" in each for each in found) is (peak is not None)
    assert any("could not be read" in each for each in found) is (peak is not None and not checks)


@pytest.mark.parametrize(
    ("fields", "listed"),
    [
        ({"timed_by": "steps", "examples_per_epoch": None}, "time between epochs"),
        ({"timed_by": "steps", "examples_per_epoch": 10**6}, None),
        ({"timed_by": "epochs", "examples_per_epoch": None}, None),
        ({"timed_by": "steps", "examples_per_epoch": 10**6, "validation_uncounted": True}, "validation"),
        ({"timed_by": "epochs", "examples_per_epoch": 10**6, "validation_uncounted": True}, None),
        ({"peak_host_bytes": None}, "peak memory"),
    ],
)
def test_what_no_figure_covers_is_listed(ended, fields, listed):
    usual = {"timed_by": "epochs", "examples_per_epoch": 1437, "peak_host_bytes": 1}
    new = set(ended.not_checked(winner={**usual, **fields})) - set(ended.not_checked(winner=usual))
    new = {gap for gap in new if "no trial came so far" not in gap}
    assert [listed in each for each in new] == [True] * (listed is not None)


def test_retracing_that_the_log_does_not_show_is_listed(ended):
    others = [each for each in ended.given["found"].checks[ended.number] if each.name != "retracing"]
    assert any("retracing" in each for each in ended.not_checked(checks=others))
    assert not any("retracing" in each for each in ended.not_checked())


def test_the_likely_larger_batch_is_the_most_promising():
    state = a_state(a_candidate(1, 0.2, batch_ratio=2.0), a_candidate(2, 0.5, batch_ratio=2.0), a_candidate(3, 0.9))
    rate = Interval(value=1.0, low=1.0, high=1.0)
    run = SimpleNamespace(
        options=Options(budget=60.0, objective="energy"),
        records={number: a_record(throughput=rate) for number in (1, 2)},
    )
    likely = likely_larger_batch(SimpleNamespace(state=state), run)
    assert (likely.speedup.value, likely.confirmed) == (pytest.approx(1.5), False)
    assert likely.learning_rate_rule.not_measured == "the objective is energy"


def test_the_bound_of_a_hopeless_measurement_can_be_written(tmp_path):
    trials = simulated_trials(faster_by(batch_size=1.1), noise=2.0)
    evidence = quick_tune(trials, tmp_path, space=ONE_CANDIDATE, budget=25.0)[0].evidence
    assert evidence.excluded_gain is None or math.isfinite(evidence.excluded_gain)
