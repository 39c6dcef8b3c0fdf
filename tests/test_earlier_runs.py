"""A run begins with the leaders of earlier runs of the same workload, and of given recipes."""

import os
from itertools import count

import pytest
from simulated_runs import (
    BASELINE,
    BATCH_SIZE,
    MACHINE,
    SMALL_SPACE,
    DirectoryWithoutStudy,
    Watcher,
    a_record,
    faster_by,
    go_on,
    on_disk,
    simulated_trials,
    space_of,
    tune_simulated,
)
from test_folders import a_recipe
from test_kind import H200, a_machine
from test_same_workload import RENAMED, a_script, a_workload

from autotune.data.facts import Gpu
from autotune.data.figures import Interval
from autotune.data.record import InterimAnalysis, Outcome, Phase, Standing
from autotune.data.run_directory import EarlierLeader, RunDirectory, RunRecord, SearchSpaceRecord
from autotune.recipe.evidence import BestConfiguration
from autotune.recipe.recipe import Recipe, read_recipes
from autotune.space.configuration import Configuration, read_trials
from autotune.stats.deciding import EndedBy, Verdict
from autotune.tuning import earlier_runs
from autotune.tuning.earlier_runs import describe_leaders, find_leaders, starting_points, why_unused
from autotune.tuning.events import Notice

SPACE = space_of()
FAST, FASTER = BASELINE.replace(jit_compile=True), BASELINE.replace(batch_size=256, jit_compile=True)
WIDE, MANY_STEPS = BASELINE.replace(batch_size=128), BASELINE.replace(steps_per_execution=8)

# ------------------------------------------------------------------------------------------ its leaders


def a_run(**fields):
    """The record of a run of the test's script."""
    choices = SearchSpaceRecord(source="test.toml", choices=dict(SPACE.choices), left_out={})
    usual = {"run": "run", "started_at": "2026-11-20T19:10:01.250+00:00", "machine": MACHINE, "arguments": {}}
    known = {"workload": a_workload(a_script()), "search_space": choices, "baseline": dict(BASELINE)}
    return RunRecord(**{**usual, **known, **fields})


@pytest.fixture
def write(tmp_path):
    """Writes a run, each newer than the one before: `write("script/one", {FAST: 1.3}, confirmed=[FAST])`."""
    times = count(1_000_000_000)

    def make(name, searched, *, confirmed=(), standing=Standing.CONFIRMED, **fields):
        directory = RunDirectory(tmp_path / name)
        with directory.create_and_lock():
            baseline = Configuration(fields.get("baseline", BASELINE))
            records = [a_record(baseline, trial=0, phase=Phase.BASELINE)]
            for configuration, found in searched.items():
                outcome = {"outcome": found} if isinstance(found, Outcome) else {"speedup": found}
                records.append(a_record(configuration, trial=len(records), **outcome))
            for configuration in confirmed:
                candidate = next(known.trial for known in records if known.configuration == dict(configuration))
                looks = InterimAnalysis(
                    leader=1, candidate=candidate, error=0.025, most=12, reference=1, standing=standing
                )
                number = len(records)
                shown = {"looks": (looks,), "ended_at_seconds": float(number)}
                records.append(a_record(configuration, trial=number, phase=Phase.CONFIRM, speedup=1.3, **shown))
            directory.write_run(a_run(**fields))
            for record in records:
                directory.write_trial(record)
        moment = next(times)
        os.utime(directory.path / "run.json", (moment, moment))
        return directory

    return make


def found_in(results, space=SPACE, **fields):
    """The leaders that a new run would begin with: the run, the changes, and how many candidates it led over."""
    return [(leader.run, leader.changes, leader.led_over) for leader in find_leaders(results, a_run(**fields), space)]


def test_recommended_configuration_precedes_the_best_other(tmp_path, write):
    write("script/one", {WIDE: 1.2, FASTER: 1.9, FAST: 1.5, MANY_STEPS: 1.1}, confirmed=[FAST, FASTER])
    assert found_in(tmp_path) == [
        ("script/one", {"batch_size": 256, "jit_compile": True}, 3),
        ("script/one", {"jit_compile": True}, 0),
    ]
    write("script/two", {WIDE: 1.2, FASTER: 1.9, MANY_STEPS: 1.3}, confirmed=[FASTER])
    assert [run for run, _, _ in found_in(tmp_path)] == ["script/two", "script/one"]


def test_best_estimate_is_second_if_only_one_is_confirmed(tmp_path, write):
    searched = {WIDE: 1.2, FAST: 1.9, MANY_STEPS: 1.3, FASTER: Outcome.OOM, BASELINE.replace(batch_size=64): 1.01}
    write("one", searched, confirmed=[FAST])
    assert found_in(tmp_path) == [("one", {"jit_compile": True}, 3), ("one", {"steps_per_execution": 8}, 0)]
    write("two", {WIDE: 1.4, FAST: 1.9}, confirmed=[WIDE], standing=Standing.NOT_SHOWN)
    assert [changes for _, changes, _ in found_in(tmp_path)] == [{"jit_compile": True}, {"steps_per_execution": 8}]
    write("three", {WIDE: 1.4}, confirmed=[WIDE], standing=Standing.OUT_OF_TIME)
    assert [changes for _, changes, _ in found_in(tmp_path)] == [{"jit_compile": True}, {"batch_size": 128}]


def test_runs_on_this_machine_precede_runs_on_the_same_device(tmp_path, write):
    gpu = Gpu(name="NVIDIA H200", memory_bytes=141 << 30)
    write("here", {FAST: 1.5}, confirmed=[FAST])
    write("slower", {WIDE: 1.5}, confirmed=[WIDE], machine=MACHINE.model_copy(update={"cpu": "another"}))
    other = {"machine": MACHINE.model_copy(update={"gpus": (gpu,)}), "workload": a_workload(a_script(), device="gpu")}
    write("gpu", {MANY_STEPS: 3.0}, confirmed=[MANY_STEPS], **other)
    assert [run for run, _, _ in found_in(tmp_path)] == ["here", "slower"]
    assert [run for run, _, _ in found_in(tmp_path, **other)] == ["gpu", "slower"]


def test_led_over_is_the_maximum_over_runs_that_a_leader_won(tmp_path, write):
    write("one", {FAST: 1.5, **{BASELINE.replace(batch_size=size): 0.9 for size in (16, 64, 128)}}, confirmed=[FAST])
    write("two", {FAST: 1.5, WIDE: 1.1}, confirmed=[FAST])
    assert found_in(tmp_path)[0] == ("two", {"jit_compile": True}, 3)
    before = EarlierLeader(run="zero", changes={"jit_compile": True}, led_over=9)
    write("three", {FAST: 1.5}, confirmed=[FAST], leaders=(before,))
    assert found_in(tmp_path)[0] == ("three", {"jit_compile": True}, 9)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"reference": "other.py", "name": "other", "fingerprint": "sha256:01"}, False),
        ({"reference": "two/train.py", "fingerprint": "sha256:01"}, False),
        ({"fingerprint": "sha256:01"}, True),
        ({"reference": "./train.py", "fingerprint": "sha256:01"}, True),
        ({"reference": "experiment.py", "name": "experiment", "script": RENAMED}, True),
    ],
    ids=["another script", "the same name elsewhere", "edited", "by another path", "renamed"],
)
def test_another_script_of_the_same_shapes_has_no_leaders_here(tmp_path, write, changes, found):
    write("train/one", {FAST: 1.5}, confirmed=[FAST])
    assert bool(found_in(tmp_path, workload=a_workload(**{"script": a_script(), **changes}))) is found


@pytest.mark.parametrize(
    ("fields", "space"),
    [
        ({"machine": MACHINE.model_copy(update={"cores": 64})}, SPACE),
        ({"search_space": SearchSpaceRecord(source="a", choices={"jit_compile": (False, True)}, left_out={})}, SPACE),
        ({"search_space": None}, SPACE),
        ({}, space_of(SMALL_SPACE.replace("[1, 8]", "[1, 8, 16]"))),
    ],
    ids=["another machine", "fewer knobs", "no space", "fewer values"],
)
def test_other_machine_or_smaller_space_resets_led_over(tmp_path, write, fields, space):
    write("one", {FAST: 1.5, WIDE: 0.9}, confirmed=[FAST], **fields)
    assert found_in(tmp_path, space) == [("one", {"jit_compile": True}, 0)]


def test_values_that_the_space_does_not_have_are_dropped(tmp_path, write):
    write("one", {FASTER: 2.0, WIDE: 1.4, MANY_STEPS: 1.2}, confirmed=[FASTER])
    kept = space_of(SMALL_SPACE.partition("[knobs.steps")[0].replace("high = 512", "high = 128"))
    assert found_in(tmp_path, kept) == [("one", {"jit_compile": True}, 0), ("one", {"batch_size": 128}, 0)]


def test_changes_of_another_baseline_are_made_to_this_one(tmp_path, write):
    own = BASELINE.replace(batch_size=64)
    write("one", {own.replace(jit_compile=True): 2.0}, confirmed=[own.replace(jit_compile=True)], baseline=dict(own))
    (leader,) = find_leaders(tmp_path, a_run(), SPACE)
    assert starting_points([leader], SPACE) == {FAST: leader}


def test_other_workloads_and_objectives_are_left_alone(tmp_path, write):
    write("one", {FAST: 1.5}, confirmed=[FAST], workload=a_workload(a_script(), parameters=7))
    write("two", {FAST: 1.5}, confirmed=[FAST], arguments={"objective": "energy"})
    write("three", {FAST: 1.5}, confirmed=[FAST], workload=None)
    assert found_in(tmp_path) == []
    assert found_in(tmp_path, arguments={"objective": "energy"}) != []


def test_damaged_runs_and_links_are_skipped_without_a_word(tmp_path, write, recwarn):
    write("a/good", {FAST: 1.5, WIDE: 1.2}, confirmed=[FAST])
    (tmp_path / "a" / "good" / "trials" / "0002" / "result.json").write_text("{")
    for name, text in {"b/empty": "", "b/other": '{"name": "theirs"}', "b/newer": '{"schema_version": 2}'}.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(text)
    inside = write("c/link", {WIDE: 1.5}, confirmed=[WIDE]).path
    (inside / "elsewhere").symlink_to(tmp_path)
    (tmp_path / "a" / "latest").symlink_to(tmp_path / "a" / "good")
    (tmp_path / "notes.txt").write_text("mine")
    assert found_in(tmp_path) == [("a/good", {"jit_compile": True}, 0)]
    assert found_in(tmp_path / "nowhere") == []
    assert list(recwarn) == []


def test_only_the_newest_runs_are_read(tmp_path, write, monkeypatch):
    write("old", {FAST: 1.5}, confirmed=[FAST])
    write("new", {WIDE: 1.5}, confirmed=[WIDE])
    for bound in ("MOST_RUNS", "MOST_READ"):
        with monkeypatch.context() as patch:
            patch.setattr(earlier_runs, bound, 1)
            assert [run for run, _, _ in found_in(tmp_path)] == ["new"]


def test_one_line_names_the_runs_and_the_configurations():
    leaders = [
        EarlierLeader(run="digits/one", changes={"batch_size": 256, "jit_compile": True}, led_over=3),
        EarlierLeader(run="digits/two", changes={"steps_per_execution": 8}),
    ]
    assert describe_leaders(leaders, SPACE) == (
        "starting from the leaders of digits/one and digits/two: batch_size=256 jit_compile=true; "
        "steps_per_execution=8. --fresh ignores earlier runs"
    )
    assert describe_leaders(leaders[:1], SPACE).startswith("starting from the leader of digits/one: batch_size=256")


# ------------------------------------------------------------------------------------------ given recipes

THROUGHPUT = {"objective": "throughput"}
GPU_RECIPE = a_recipe(a_machine(H200), batch_size=256, evidence=THROUGHPUT)
OLD_RECIPE = a_recipe(a_machine(tensorflow="2.18.0"), jit_compile=True, evidence=THROUGHPUT)


def found_with(*recipes, results=None, space=SPACE, **fields):
    """The leaders of a new run with these recipes: where they are from, and the changes."""
    run = a_run(**{"arguments": THROUGHPUT, **fields})
    leaders = find_leaders(results, run, space, recipes)
    of_recipes = [leader for leader in leaders if leader.run.startswith("the recipe")]
    assert all(leader.confirmed and not leader.led_over for leader in of_recipes)
    return [(leader.run, leader.changes) for leader in leaders]


def test_recipes_are_ordered_by_nearness_of_their_machine():
    assert found_with(GPU_RECIPE, OLD_RECIPE) == [
        ("the recipe of simulated × 2 cores, TensorFlow 2.18, Keras 3", {"jit_compile": True}),
        ("the recipe of NVIDIA H200, TensorFlow 2.21, Keras 3", {"batch_size": 256}),
    ]
    on_gpu = {"machine": a_machine(H200, tensorflow="2.20.0"), "workload": a_workload(a_script(), device="gpu")}
    assert [changes for _, changes in found_with(GPU_RECIPE, OLD_RECIPE, **on_gpu)] == [
        {"batch_size": 256},
        {"jit_compile": True},
    ]


def test_what_a_space_does_not_hold_whole_was_not_confirmed():
    recipe = a_recipe(a_machine(H200), batch_size=256, jit_compile=True, evidence=THROUGHPUT)
    without_batch_sizes = space_of("schema_version = 1" + SMALL_SPACE.partition("high = 512")[2])
    run = a_run(arguments=THROUGHPUT)
    for space, confirmed in ((SPACE, True), (without_batch_sizes, False)):
        (leader,) = find_leaders(None, run, space, (recipe,))
        assert leader.confirmed is confirmed


def test_both_answers_of_a_recipe_are_used_if_confirmed():
    one = Interval(value=1.2, low=1.1, high=1.3)
    answers = {
        "same_training": BestConfiguration(configuration=dict(MANY_STEPS), speedup=one, throughput=one, confirmed=True),
        "larger_batch": BestConfiguration(configuration=dict(WIDE), speedup=one, throughput=one, confirmed=False),
    }
    assert [changes for _, changes in found_with(OLD_RECIPE.model_copy(update=answers))] == [
        {"jit_compile": True},
        {"steps_per_execution": 8},
    ]


def test_earlier_runs_and_recipes_are_taken_together(tmp_path, write):
    write("one", {FAST: 1.5, WIDE: 1.4, MANY_STEPS: 1.3}, confirmed=[FAST], arguments=THROUGHPUT)
    assert found_with(GPU_RECIPE, OLD_RECIPE, results=tmp_path) == [
        ("one", {"jit_compile": True}),
        ("one", {"batch_size": 128}),
        ("the recipe of NVIDIA H200, TensorFlow 2.21, Keras 3", {"batch_size": 256}),
    ]


def test_earlier_steps_per_execution_round_up_to_next_choice():
    in_force = a_recipe(a_machine(H200), steps_per_execution=6)
    assert [changes for _, changes in found_with(in_force)] == [{"steps_per_execution": 8}]
    assert found_with(a_recipe(a_machine(H200), steps_per_execution=16)) == []


def test_many_recipes_cost_few_candidates():
    machines = [a_machine(cores=cores) for cores in (4, 8, 16, 32, 64, 128)]
    sizes = (16, 64, 128, 256, 512, 32)
    steps = [8 if size == 32 else 1 for size in sizes]
    recipes = [
        a_recipe(machine, batch_size=size, steps_per_execution=step, evidence=THROUGHPUT)
        for machine, size, step in zip(machines, sizes, steps, strict=True)
    ]
    assert [changes["batch_size"] for _, changes in found_with(*recipes[::-1])] == [16, 64, 128, 256]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"workload": a_workload(a_script(), parameters=7)}, "it is of another training: their models have"),
        ({"arguments": {"objective": "energy"}}, "its objective is throughput"),
    ],
)
def test_recipes_of_another_training_are_not_used_and_why(fields, why):
    assert why_unused((GPU_RECIPE,), a_run(**{"arguments": THROUGHPUT, **fields})).startswith(why)
    assert why_unused((GPU_RECIPE,), a_run(arguments=THROUGHPUT)) == ""


# ------------------------------------------------------------------------------------------ whole runs

SPEED = faster_by(jit_compile=1.5, batch_size=1.1)
QUIET = {"noise": 0.02, "instance_noise": 0.005}


def tuned(results, name, trials, /, *, watcher=None, **options):
    """A run below the results directory that ends when it is settled: its recipe, and its records by phase."""
    options = {"budget": 600.0, "keeps_budget": False, "results": results, **options}
    with on_disk(results / name, DirectoryWithoutStudy) as directory:
        recipe = tune_simulated(trials, directory, observe=watcher or Watcher(), **options)
    records = list(read_trials(directory))
    return recipe, *([record for record in records if record.phase is phase] for phase in (Phase.SEARCH, Phase.CONFIRM))


def test_second_run_starts_with_earlier_leaders_and_ends_soon(tmp_path):
    first, searched, _ = tuned(tmp_path, "simulated/one", simulated_trials(SPEED, **QUIET))
    watcher = Watcher()
    second, tried, _ = tuned(tmp_path, "simulated/two", simulated_trials(SPEED, **QUIET), watcher=watcher)
    assert first.evidence.verdict is second.evidence.verdict is Verdict.FASTER
    assert tried[0].configuration == first.configuration
    assert len(searched) > 8
    assert len(tried) == 2
    assert second.evidence.ended_by is EndedBy.SETTLED
    assert second.created_by.started_from == ("simulated/one",)
    (notice,) = [event.text for event in watcher.of(Notice) if "earlier runs" in event.text]
    assert notice.startswith("starting from the leaders of simulated/one: ")
    third, tried, _ = tuned(tmp_path, "simulated/three", simulated_trials(SPEED, **QUIET))
    assert (third.configuration, len(tried)) == (first.configuration, 2)


def test_search_goes_on_if_an_earlier_leader_is_now_slower(tmp_path):
    tuned(tmp_path, "one", simulated_trials(faster_by(jit_compile=1.5), **QUIET))
    recipe, tried, _ = tuned(tmp_path, "two", simulated_trials(faster_by(jit_compile=0.7, batch_size=1.4), **QUIET))
    assert tried[0].configuration["jit_compile"] is True
    assert recipe.configuration["jit_compile"] is False
    assert recipe.configuration["batch_size"] != BATCH_SIZE
    assert len(tried) > 8


@pytest.mark.parametrize(("objective", "found"), [("time_to_loss", [{"batch_size": 128}]), ("throughput", [])])
def test_run_without_gain_may_give_leaders_of_other_batch_sizes(tmp_path, write, objective, found):
    """They count only for the objective time_to_loss."""
    arguments = {"objective": objective}
    directory = write("one", {WIDE: 2.0, FAST: 1.05}, confirmed=[WIDE], arguments=arguments)
    a_recipe(evidence={"verdict": Verdict.NO_SIGNIFICANT_GAIN}).save(directory.recipe_file)
    assert [changes for _, changes, _ in found_in(tmp_path, arguments=arguments)] == found


def test_a_resumed_run_keeps_the_leaders_that_it_began_with(tmp_path):
    tuned(tmp_path, "one", simulated_trials(SPEED, **QUIET))
    tuned(tmp_path, "two", simulated_trials(SPEED, **QUIET), budget=20.0, trials=1)
    before = RunDirectory(tmp_path / "two").read_run().leaders
    assert before
    tuned(tmp_path, "three", simulated_trials(faster_by(steps_per_execution=2.0), **QUIET))
    recipe = go_on(simulated_trials(SPEED, **QUIET), tmp_path / "two", budget=100.0, trials=2)
    assert RunDirectory(tmp_path / "two").read_run().leaders == before
    assert recipe.created_by.started_from == ("one",)
    tried = [each.configuration for each in read_trials(RunDirectory(tmp_path / "two")) if each.phase is Phase.SEARCH]
    assert tried == [dict(configuration) for configuration in starting_points(before, SPACE)]
    assert Recipe.load(tmp_path / "two" / "recipe.json") == recipe


def test_run_begins_with_recipe_configurations_and_says_so(tmp_path):
    first, *_ = tuned(tmp_path, "one", simulated_trials(SPEED, **QUIET), results=None)
    elsewhere = first.model_copy(update={"machine": a_machine(cores=8)})
    elsewhere.save(tmp_path / "elsewhere.json")
    watcher, source = Watcher(), read_recipes(tmp_path / "elsewhere.json")
    trials = simulated_trials(SPEED, **QUIET)
    second, tried, confirmed = tuned(tmp_path, "two", trials, watcher=watcher, results=None, begin_with=source)
    name = "the recipe of simulated × 8 cores, TensorFlow 2.21, Keras 3"
    assert tried[0].configuration == first.configuration
    claimed = min(looks.confirmed_at_seconds for record in confirmed for looks in record.looks)
    assert claimed < tried[1].ended_at_seconds, "another machine has chosen it"
    assert len(tried) > 8, "on this machine another may be faster"
    assert second.created_by.started_from == (name,)
    assert any(event.text.startswith(f"starting from the leader of {name}: ") for event in watcher.of(Notice))


def test_recipes_that_cannot_be_used_are_named(tmp_path):
    first, *_ = tuned(tmp_path, "one", simulated_trials(SPEED, **QUIET), results=None)
    other = first.model_copy(update={"workload": first.workload.model_copy(update={"name": "other"})})
    other.save(tmp_path / "other.json")
    watcher, options = Watcher(), {"begin_with": read_recipes(tmp_path / "other.json"), "budget": 20.0}
    recipe, *_ = tuned(tmp_path, "two", simulated_trials(SPEED, **QUIET), watcher=watcher, results=None, **options)
    assert recipe.created_by.started_from == ()
    (notice,) = [event.text for event in watcher.of(Notice) if "not used" in event.text]
    assert notice.endswith("other.json is not used: it is of another training: one is other, the other simulated")
