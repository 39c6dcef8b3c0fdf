"""`benchmarks/answers.py`: what it reads from a run's files, and what it makes of them."""

import json

import answers
import pytest

BASELINE = {"batch_size": 32}
SLOW, FAST = BASELINE | {"prefetch": 2}, BASELINE | {"jit_compile": True}


def key(configuration):
    """A configuration as the referee names it."""
    return answers.Configuration(configuration).key


def searched(number, configuration, ended_at, speedup, **more):
    """A trial of the search."""
    found = {"trial": number, "phase": "search", "configuration": configuration, "outcome": "ok"}
    found |= {"seconds": 3.0, "ended_at_seconds": ended_at, "pairs": [], "slices": []}
    return found | {"speedup": speedup and {"value": speedup}} | more


def run_of(trials=(), recipe=None, *, name="digits_mlp", budget="2m", wall_seconds=130.0):
    """A run of the tuner, from its files."""
    command = {"name": name, "budget": budget, "exit_code": 0, "remark": ""}
    return answers.read_run(list(trials), recipe, wall_seconds=wall_seconds, **command)


def recipe_of(verdict, configuration=FAST, spent_seconds=120.0):
    """A recipe."""
    evidence = {"verdict": verdict, "speedup": {"value": 2.0, "low": 1.8, "high": 2.2}}
    created = {"spent_seconds": spent_seconds, "budget_seconds": 120.0}
    return {"evidence": evidence, "created_by": created, "configuration": configuration}


def test_only_candidates_that_look_best_and_faster_than_the_baseline_are_beliefs():
    trials = [
        searched(1, BASELINE | {"prefetch": 8}, 10.0, 0.9),
        searched(2, SLOW, 20.0, 1.5),
        searched(3, BASELINE | {"prefetch": 4}, 30.0, 9.0, outcome="unstable"),
        searched(4, BASELINE | {"prefetch": 6}, 40.0, None),
        searched(5, FAST, 50.0, 1.8),
        searched(6, BASELINE, 60.0, 9.0, phase="confirm"),
    ]
    assert answers.beliefs_of(trials, 2.0) == [(22.0, SLOW), (52.0, FAST)]


def test_the_recipe_is_the_last_belief_if_it_claims_a_gain():
    assert run_of(recipe=recipe_of("faster")).beliefs == [(130.0, FAST)]
    assert run_of(recipe=recipe_of("undecided", BASELINE)).beliefs == []


def test_a_slice_in_several_records_is_timed_once():
    shared, own, other = ({"at": at, "seconds": 0.5} for at in (1.0, 2.0, 3.0))
    trials = [
        {"slices": [shared], "pairs": []},
        {"slices": [], "pairs": [{"baseline": shared, "candidate": own}]},
        {"slices": [], "pairs": [{"baseline": shared, "candidate": other}]},
    ]
    assert answers.timed_seconds(trials) == pytest.approx(1.5)


def test_the_first_belief_near_the_best_counts():
    speeds = {key(SLOW): 1.0, key(FAST): 2.0, key(BASELINE): 1.91}
    assert answers.first_near_best([(5.0, SLOW), (9.0, BASELINE), (12.0, FAST)], speeds) == 9.0
    assert answers.first_near_best([(5.0, SLOW)], speeds) is None


@pytest.mark.parametrize(("plain", "name", "value"), [([(60.0, FAST)], "", 3.0), ([(60.0, SLOW)], " (at least)", 6.0)])
def test_a_loop_that_never_finds_the_best_counts_with_its_budget(plain, name, value):
    run = run_of([searched(1, FAST, 10.0, 2.0)], recipe_of("undecided", BASELINE))
    found = answers.compared(run, plain, {key(SLOW): 1.0, key(FAST): 2.0})
    assert found[f"times sooner than plain Optuna, digits_mlp{name}"]["value"] == pytest.approx(value)


def test_a_tuner_that_never_finds_the_best_misses_the_bar():
    found = answers.compared(run_of(), [(60.0, FAST)], {key(FAST): 2.0})
    assert found["times sooner than plain Optuna, digits_mlp"]["value"] is None


def test_only_unsettled_runs_with_much_time_left_gave_up_early():
    assert not run_of(recipe=recipe_of("faster", spent_seconds=30.0)).left_time
    assert not run_of(recipe=recipe_of("undecided", spent_seconds=115.0)).left_time
    assert run_of(recipe=recipe_of("undecided", spent_seconds=113.0)).left_time
    assert run_of(wall_seconds=20.0).left_time


def test_results_are_the_same_after_a_file(tmp_path):
    file = tmp_path / "answers.json"
    results = answers.Results(file)
    run = run_of([searched(1, FAST, 10.0, 2.0)], recipe_of("faster"))
    results.runs["digits_mlp 2m"] = run
    results.plain["digits_mlp 2m"] = [(20.0, FAST)]
    results.referee["digits_mlp 2m"] = {key(FAST): 2.0}
    results.save()
    loaded = answers.Results.load(file)
    assert json.dumps(loaded.parts) == json.dumps(results.parts)
    assert answers.figures(loaded) == json.loads(file.read_text())["figures"]
    assert answers.figures(loaded)["settled after 2m"]["bar"] is None  # one workload of eight


def test_candidates_are_counted_once_each():
    run = run_of([searched(1, FAST, 10.0, 2.0), searched(2, FAST, 20.0, 2.0)])
    assert (run.candidates, run.candidate_seconds) == (1, [3.0, 3.0])
