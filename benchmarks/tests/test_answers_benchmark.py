"""`benchmarks/answers.py` and `slow_answers.py`: what they read from a run's files, and what they make of them."""

import json
from pathlib import Path

import answers
import plain_script
import pytest
import runs
import slow_answers

RECIPE = Path(__file__).parents[2] / "results" / "recorded" / "digits_mlp_command_one" / "recipe.json"
BASELINE = {"batch_size": 32}
SLOW, FAST = BASELINE | {"prefetch": 2}, BASELINE | {"jit_compile": True}


def key(configuration):
    """A configuration as the referee names it."""
    return runs.Configuration(configuration).key


def timed(at, seconds=2.0, steps=2):
    """A slice of steps of one second that ended at that second of the run."""
    return {"at": at, "seconds": seconds, "steps": steps}


def pair(at, instance=0):
    """A slice of the baseline, and one of the candidate that ended at that second of the run."""
    return {"instance": instance, "baseline": timed(at - 2.0), "candidate": timed(at)}


def searched(number, configuration, ended_at, speedup, **more):
    """A trial of the search."""
    found = {"trial": number, "phase": "search", "configuration": configuration, "outcome": "ok"}
    found |= {"seconds": 3.0, "ended_at_seconds": ended_at, "pairs": [], "slices": [], "looks": [], "processes": []}
    return found | {"instances": 1, "speedup": speedup and {"value": speedup}} | more


def measured(number, ends, *, start=5.0, configuration=FAST, **more):
    """A trial of the search whose processes were measured until these seconds of the run."""
    pairs = [pair(at, instance) for instance, end in enumerate(ends) for at in (end - 4.0, end)]
    logs = [{"first_step_seconds": start, "ready_seconds": start + 3.0} for _ in ends]
    return searched(number, configuration, ends[-1], 1.5, pairs=pairs, processes=logs, instances=len(ends), **more)


def baseline(at=20.0):
    """The baseline: asked for at 5 s, its first step ends at 13 s, warm at 16 s, timed from 18 s on."""
    logs = [{"first_step_seconds": 8.0, "ready_seconds": 11.0}]
    slices = [timed(at - 2.0), timed(at)]
    return searched(0, BASELINE, 90.0, None, phase="baseline", slices=slices, processes=logs)


def confirmed(number, configuration, ended_at, speedup, confirmed_at=None):
    """A trial of a confirmation."""
    looks = [{"confirmed_at_seconds": confirmed_at}]
    return searched(number, configuration, ended_at, speedup, phase="confirm", looks=looks, slices=[timed(ended_at)])


def run_of(trials=(), recipe=None, *, name="digits_mlp", budget="2m", wall_seconds=130.0):
    """A run of the tuner, from its files."""
    command = {"name": name, "budget": budget, "exit_code": 0, "remark": ""}
    return runs.read_run(list(trials), recipe, wall_seconds=wall_seconds, **command)


def recipe_of(verdict, configuration=FAST, spent_seconds=120.0):
    """A recipe."""
    evidence = {"verdict": verdict, "speedup": {"value": 2.0, "low": 1.8, "high": 2.2}}
    created = {"spent_seconds": spent_seconds, "budget_seconds": 120.0}
    return {"evidence": evidence, "created_by": created, "configuration": configuration}


def test_only_candidates_that_look_best_are_beliefs():
    trials = [
        searched(1, BASELINE | {"prefetch": 8}, 10.0, 0.9),
        searched(2, SLOW, 20.0, 1.5),
        searched(3, BASELINE | {"prefetch": 4}, 30.0, 9.0, outcome="unstable"),
        searched(4, BASELINE | {"prefetch": 6}, 40.0, None),
        searched(5, FAST, 50.0, 1.8),
        searched(6, BASELINE, 60.0, 9.0, phase="confirm"),
    ]
    assert run_of(trials).beliefs == [(20.0, SLOW), (50.0, FAST)]


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
    assert runs.timed_seconds(trials) == pytest.approx(1.5)


def test_the_first_belief_near_the_best_counts():
    speeds = {key(SLOW): 1.0, key(FAST): 2.0, key(BASELINE): 1.91}
    assert runs.first_near_best([(5.0, SLOW), (9.0, BASELINE), (12.0, FAST)], speeds) == 9.0
    assert runs.first_near_best([(5.0, SLOW)], speeds) is None


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


def test_a_candidate_costs_the_time_since_the_figure_before():
    trials = [baseline(at=20.0), measured(1, [31.0]), measured(2, [45.0, 52.0])]
    assert runs.candidate_steps(trials) == pytest.approx([6.0, 9.0, 2.0])


def test_a_candidate_after_a_confirmation_is_left_out():
    failed = searched(2, SLOW, 40.0, None, outcome="crashed")
    trials = [baseline(), measured(1, [31.0]), failed, measured(3, [52.0]), confirmed(4, FAST, 60.0, 1.5)]
    assert runs.candidate_steps([*trials, measured(5, [80.0])]) == pytest.approx([6.0, 7.0])


def test_a_process_that_died_cold_leaves_its_trial_out():
    died = measured(1, [31.0]) | {"instances": 2}
    assert runs.candidate_steps([baseline(), died]) == []
    assert runs.first_candidate_steps([baseline(), died]) is None


def test_the_first_candidate_counts_from_the_baselines_step():
    assert runs.first_candidate_steps([baseline(), measured(2, [45.0]), measured(1, [31.0])]) == pytest.approx(13.0)
    assert runs.first_candidate_steps([baseline()]) is None


def test_a_run_is_settled_at_its_first_claim_or_else_at_its_end():
    trials = [
        confirmed(3, FAST, 60.0, 1.5, 60.0),
        confirmed(5, SLOW, 50.0, 1.2, 50.0),
        confirmed(6, BASELINE, 70.0, None),
    ]
    assert run_of(trials, recipe_of("faster")).settled_seconds == 60.0  # the command began ten seconds earlier
    assert run_of(trials, recipe_of("no_significant_gain")).settled_seconds == 130.0
    assert run_of(trials, recipe_of("undecided")).settled_seconds is None


def test_a_confirmation_says_more_of_a_speed_than_the_search():
    trials = [confirmed(3, FAST, 60.0, 1.6), searched(4, SLOW, 20.0, 1.2), searched(5, FAST, 30.0, 2.0)]
    assert runs.speedups_of(trials) == {key(FAST): 1.6, key(SLOW): 1.2}


def test_the_share_of_the_best_is_of_what_looked_best_by_then():
    run = run_of([searched(1, SLOW, 10.0, 1.2), searched(2, FAST, 50.0, 2.0)], recipe_of("undecided"))
    best = run_of([searched(1, FAST, 10.0, 3.0)], recipe_of("undecided"))
    known = runs.pool_speedups([run, best])
    assert known == pytest.approx({key(SLOW): 1.2, key(FAST): 6.0**0.5})
    assert runs.share_of_best(run, known, candidates=1) == pytest.approx(1.2 / 6.0**0.5)
    assert runs.share_of_best(run, known, seconds=5.0) == pytest.approx(1.0 / 6.0**0.5)  # the baseline so far
    assert runs.share_of_best(run, known) == pytest.approx(1.0)
    assert runs.share_of_best(run_of(), {}) == 1.0  # nothing is known to be faster than the baseline


def test_results_are_the_same_after_a_file(tmp_path):
    file = tmp_path / "answers.json"
    results = answers.Results("answers", answers.figures, file)
    run = run_of([baseline(), measured(1, [31.0])], recipe_of("faster"))
    results.runs["digits_mlp 2m"] = run
    results.plain["digits_mlp 2m"] = [(20.0, FAST)]
    results.referee["digits_mlp 2m"] = {key(FAST): 2.0}
    results.save()
    loaded = answers.Results("answers", answers.figures, file)
    assert json.dumps(loaded.parts) == json.dumps(results.parts)
    assert answers.figures(loaded) == json.loads(file.read_text())["figures"]
    assert answers.figures(loaded)["settled after 2m"]["bar"] is None  # one workload of eight


def test_the_slow_table_follows_from_the_runs_of_each_script():
    results = slow_answers.Results("slow_answers", slow_answers.figures, None)
    trials = [baseline(), measured(1, [31.0]), confirmed(2, FAST, 290.0, 2.0, 290.0)]
    command = {"name": "convnet", "budget": "10m"}
    results.runs["convnet first"] = run_of(
        trials, recipe_of("faster", spent_seconds=590.0), wall_seconds=600.0, **command
    )
    again = [baseline(), measured(1, [31.0]), confirmed(2, FAST, 80.0, 2.0, 80.0)]
    results.runs["convnet again"] = run_of(
        again, recipe_of("faster", spent_seconds=90.0), wall_seconds=100.0, **command
    )
    found = slow_answers.figures(results)
    assert found["steps until the first candidate's figure, median"]["value"] == pytest.approx(13.0)
    assert found["steps a candidate costs, median of the scripts"]["value"] == pytest.approx(6.0)
    assert found["settled after 5m"]["value"] == found["settled after 10m"]["value"] == 1
    assert found["time until settled, second run over first, median"]["value"] == pytest.approx(90.0 / 300.0)
    assert found["share of the best known speed after 3 candidates, median"]["value"] == pytest.approx(1.0)
    assert found["runs that end unsettled with time left"]["value"] == 0


def test_a_run_settled_late_counts_for_its_budget_only():
    late = run_of(recipe=recipe_of("no_significant_gain", spent_seconds=604.0), wall_seconds=610.0, budget="10m")
    assert not slow_answers.is_settled_by(late, "5m")
    assert slow_answers.is_settled_by(late, "10m")


def test_candidates_are_counted_once_each():
    run = run_of([searched(1, FAST, 10.0, 2.0), searched(2, FAST, 20.0, 2.0)])
    assert (run.candidates, run.candidate_seconds) == (1, [3.0, 3.0])


def test_a_plain_training_is_as_fast_as_its_median_call(monkeypatch, capsys):
    class Left(Exception):
        pass

    def exit_now(status):
        raise Left

    monkeypatch.setattr(plain_script, "exit_now", exit_now)
    recipe = plain_script.Recipe.load(RECIPE)
    moments = iter([0.0, 30.0, 31.0, 32.0, 33.0, 50.0, 51.0, 52.0, 53.0, 54.0])  # compiles, then an epoch ends
    timer = plain_script.Timer(recipe, seconds=4.0, clock=lambda: next(moments))
    with pytest.raises(Left):
        [timer.called(64) for _ in range(10)]
    assert json.loads(capsys.readouterr().out) == {"samples_per_second": 64.0}
    assert next(moments) == 53.0


def test_run_directories_are_in_the_order_of_their_making(tmp_path):
    for name in ("20261126-120000-b", "20261126-110000-a"):
        (tmp_path / "results" / "convnet" / name).mkdir(parents=True)
        (tmp_path / "results" / "convnet" / name / "run.json").touch()
    (tmp_path / "results" / "convnet" / "latest").symlink_to("20261126-120000-b")
    names = [directory.name for directory in slow_answers.run_directories(tmp_path)]
    assert names == ["20261126-110000-a", "20261126-120000-b"]
