"""A recipe's claim, measured again on simulated trials: it holds, is weaker, is gone, or is undecided."""

import contextlib
import math
import re
import signal
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
from simulated_runs import (
    BASELINE,
    FAST,
    MACHINE,
    REFERENCE,
    Watcher,
    an_invocation,
    faster_by,
    on_disk,
    quick_tune,
    simulated_trials,
    space,
)

from autotune.data.errors import ArgumentError, NoStableConfigurationError, RecipeError, TuningInterruptedError
from autotune.data.figures import LogInterval
from autotune.data.options import MEMORY_MARGIN, MIN_GAIN
from autotune.data.record import Outcome, Phase
from autotune.recipe import recipe as recipe_module
from autotune.runtime.executor import TrialFailed
from autotune.script.workload import Workload
from autotune.stats.deciding import ClaimResult
from autotune.tuning import verify as verify_module
from autotune.tuning.events import Notice, TrialBegan, TrialEnded, TrialMeasured, silent
from autotune.tuning.verify import Verification, measured_claim, verify, verify_with

SPACE = space(batch_size=[32, 128])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that claims ×1.5 for a batch of 128."""
    made, _ = quick_tune(
        simulated_trials(faster_by(batch_size=1.5), noise=0.03), tmp_path_factory.mktemp("run"), space=SPACE
    )
    assert made.configuration["batch_size"] == 128
    return made


def found(recipe, path, *, speed=1.5, budget=100.0, observe=None, found_by_object=False, **settings):
    """The verification on a machine where the batch gives this."""
    trials = simulated_trials(faster_by(batch_size=speed), **{"noise": 0.03, "seed": 8, **settings})
    with on_disk(path / "run") as directory:
        invocation = an_invocation(trials, directory, observe=observe or Watcher(), budget=budget)
        verification = verify_with(invocation, recipe, found_by_object=found_by_object)
    assert trials.alive == []
    assert trials.clock() <= 1.1 * budget
    return verification


@pytest.mark.parametrize(("speed", "expected"), [(1.5, ClaimResult.HOLDS), (1.0, ClaimResult.GONE)])
def test_the_budget_that_a_recipe_names_suffices_for_a_yes_or_no(recipe, tmp_path, speed, expected):
    seconds = recipe.evidence.verify_seconds
    assert seconds % 10 == 0
    assert found(recipe, tmp_path, speed=speed, budget=seconds).finding is expected


def test_a_claim_takes_no_more_time_than_it_needs(recipe, tmp_path):
    verification = found(recipe, tmp_path, budget=2000.0)
    assert 8 <= verification.instances < 30


def test_the_trials_line_and_the_finding_have_the_same_figure(recipe, tmp_path):
    watcher = Watcher()
    verification = found(recipe, tmp_path, observe=watcher, instance_noise=0.1)
    (confirmed,) = [event.record for event in watcher.of(TrialEnded) if event.record.phase is Phase.CONFIRM]
    assert confirmed.speedup == verification.measured


def test_where_noise_hides_all_nothing_is_decided(recipe, tmp_path):
    verification = found(recipe, tmp_path, noise=2.0, budget=200.0)
    assert verification.finding is ClaimResult.UNDECIDED
    assert verification.reason.endswith("give --budget 400s")


def test_budget_for_under_two_processes_names_a_larger_one(recipe, tmp_path):
    budget, advised = 12.0, []
    while len(advised) < 6:
        verification = found(recipe, tmp_path / str(budget), budget=budget)
        if verification.finding is not ClaimResult.UNDECIDED:
            break
        advised.append(verification)
        budget = float(re.search(r"give --budget (\d+)s$", verification.reason)[1])
    assert advised[0].measured is None
    assert "fewer than two fresh processes a side" in advised[0].reason
    assert verification.finding is ClaimResult.HOLDS
    assert budget <= 100.0


@pytest.mark.parametrize("enough", [1, 5])
def test_ctrl_c_judges_what_there_is(recipe, tmp_path, enough):
    stopping = threading.Event()

    def react(event):
        if isinstance(event, TrialMeasured) and len(watcher.of(TrialMeasured)) == enough:
            signal.raise_signal(signal.SIGINT)
        if isinstance(event, Notice) and "stopping" in event.text:
            assert "--resume" not in event.text, "nothing is kept that could be gone on with"
            stopping.set()

    watcher = Watcher(react)
    if enough == 1:
        with pytest.raises(TuningInterruptedError) as interrupted:
            found(recipe, tmp_path, observe=watcher)
        assert interrupted.value.exit_code == 130
    else:
        verification = found(recipe, tmp_path, observe=watcher)
        assert verification.finding is ClaimResult.HOLDS
        assert verification.instances == enough
    assert stopping.wait(timeout=30)


def out_of_memory(configuration):
    """The batch of 128 does not fit."""
    return TrialFailed(Outcome.OOM, "out of memory") if configuration["batch_size"] == 128 else None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"failure": out_of_memory}, "it failed (oom): out of memory"),
        (
            {"retraces": lambda configuration: 5 if configuration["batch_size"] == 128 else 0},
            "it failed a stability check: retracing: ",
        ),
        (
            {"leak": lambda configuration: 40_000.0 if configuration["batch_size"] == 128 else 0.0},
            "it failed a stability check: host_memory_growth: ",
        ),
    ],
)
def test_a_configuration_that_fails_or_breaks_a_rule_is_unstable(recipe, tmp_path, settings, expected):
    verification = found(recipe, tmp_path, **settings)
    assert verification.finding is ClaimResult.UNSTABLE
    assert verification.reason.startswith(expected)
    assert (place_in(verification.reason) / "result.json").is_file()


def place_in(text):
    """The directory that a reason sends the reader to."""
    return Path(re.search(r"\(see (.+)\)$", text)[1])


def test_a_baseline_that_fails_beside_it_is_not_want_of_time(recipe, tmp_path):
    launched = []

    def failure(configuration):
        if configuration["batch_size"] == 32:
            launched.append(configuration)
        return TrialFailed(Outcome.CRASHED, "gone") if len(launched) > 1 else None

    verification = found(recipe, tmp_path, failure=failure)
    assert verification.finding is ClaimResult.UNDECIDED
    assert verification.reason.startswith("the baseline kept failing: gone (see ")
    assert "--budget" not in verification.reason
    assert place_in(verification.reason).is_dir()


def test_a_baseline_that_fails_now_and_then_does_not_end_it(recipe, tmp_path):
    launched = []

    def failure(configuration):
        if configuration["batch_size"] == 32:
            launched.append(configuration)
        return TrialFailed(Outcome.CRASHED, "gone") if len(launched) % 3 == 2 else None

    watcher = Watcher()
    verification = found(recipe, tmp_path, failure=failure, observe=watcher)
    assert verification.finding is ClaimResult.HOLDS
    assert sum("this pair is not counted" in notice.text for notice in watcher.of(Notice)) > 2


@pytest.mark.parametrize("options", [{"budget": -1}, {"budget": math.nan}, {"seed": -1}, {"memory_margin": 2}])
def test_options_are_checked(recipe, tmp_path, options):
    with pytest.raises(ArgumentError, match=f"{next(iter(options))}: Input should be "):
        verify(recipe, str(tmp_path / "train.py"), **options)


def test_the_memory_that_must_stay_free_is_the_users(recipe, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("workload = None\n")
    given = settings_of_verify_with(monkeypatch)
    for options in ({"memory_margin": 0.02}, {}):
        verify(recipe, f"{tmp_path / 'train.py'}:workload", **options)
    assert [each["limits"].margin for each in given] == [0.02, MEMORY_MARGIN]


def settings_of_verify_with(monkeypatch):
    """A list of what `verify` hands over from now on, one entry for each time; nothing is measured."""
    given = []
    nothing = Verification(finding=ClaimResult.UNDECIDED, claimed=None, measured=None, instances=0, reason="")

    def verify_with_nothing(invocation, recipe, *, found_by_object):
        given.append({"limits": invocation.limits, "found_by_object": found_by_object})
        return nothing

    monkeypatch.setattr(verify_module, "verify_with", verify_with_nothing)
    return given


def test_another_baseline_is_refused(recipe, tmp_path):
    other = recipe.model_copy(update={"baseline": {**recipe.baseline, "prefetch": 2}})
    with pytest.raises(RecipeError, match="against another baseline: prefetch=2 there, prefetch=0 here"):
        found(other, tmp_path)


def of_workload(recipe, **changes):
    """The recipe, of a workload of another name or source."""
    return recipe.model_copy(update={"workload": recipe.workload.model_copy(update=changes)})


def test_another_workload_is_refused(recipe, tmp_path):
    other = of_workload(recipe, name="digits", fingerprint="sha256:11")
    watcher = Watcher()
    with pytest.raises(RecipeError) as refused:
        found(other, tmp_path, observe=watcher)
    assert refused.value.exit_code == 2
    assert f"{REFERENCE} is the workload 'simulated'" in refused.value.message
    assert refused.value.message.endswith("but the recipe was made for 'digits'")
    assert "Give the workload that the recipe was made for" in refused.value.hint
    assert "Workload(name='digits')" in refused.value.hint
    assert watcher.of(TrialBegan) == []


def test_a_workload_that_was_only_renamed_is_the_same(recipe, tmp_path):
    watcher = Watcher()
    assert found(of_workload(recipe, name="digits"), tmp_path, observe=watcher).finding is ClaimResult.HOLDS
    assert not [notice for notice in watcher.of(Notice) if "recipe" in notice.text]


def test_an_object_that_a_script_has_imported_is_not_refused(recipe, tmp_path):
    other = of_workload(recipe, name="digits", fingerprint="sha256:11")
    watcher = Watcher()
    verification = found(other, tmp_path, observe=watcher, found_by_object=True)
    assert verification.finding is ClaimResult.HOLDS
    assert any("the recipe calls it 'digits'" in notice.text for notice in watcher.of(Notice))


FUNCTIONS = {"model": lambda: None, "dataset": lambda: None, "compile": dict, "batch_size": 32}
UNNAMED = Workload(**FUNCTIONS)
NAMED = Workload(**FUNCTIONS, name="digits")


@pytest.mark.parametrize(
    ("workload", "expected"), [(UNNAMED, True), (NAMED, False), (f"{Path(__file__)}:NAMED", False)]
)
def test_only_an_unnamed_object_is_found_by_object(recipe, monkeypatch, workload, expected):
    given = settings_of_verify_with(monkeypatch)
    verify(recipe, workload)
    assert [each["found_by_object"] for each in given] == [expected]


def test_another_file_and_another_machine_are_said(recipe, tmp_path):
    machine = recipe.machine.model_copy(update={"cores": 64})
    workload = recipe.workload.model_copy(update={"fingerprint": "sha256:11"})
    watcher = Watcher()
    found(recipe.model_copy(update={"machine": machine, "workload": workload}), tmp_path, observe=watcher)
    notices = [notice.text for notice in watcher.of(Notice)]
    assert any("another machine: cores: measured on 64, here 2" in notice for notice in notices)
    assert any("the file changed after the recipe was made" in notice for notice in notices)


def test_what_is_odd_about_the_baseline_is_said(recipe, tmp_path):
    watcher = Watcher()
    found(recipe, tmp_path, observe=watcher, retraces=lambda configuration: 3)
    assert any("the workload retraces" in notice.text for notice in watcher.of(Notice))


def claiming_nothing(recipe, baseline):
    """A recipe that is this baseline."""
    return recipe.model_copy(update={"configuration": baseline, "baseline": baseline})


def test_a_recipe_that_claims_nothing_holds(recipe, tmp_path):
    watcher = Watcher()
    verification = found(claiming_nothing(recipe, recipe.baseline), tmp_path, observe=watcher)
    assert verification.finding is ClaimResult.HOLDS
    assert verification.claimed is None
    assert [event.phase for event in watcher.of(TrialBegan)] == [Phase.BASELINE]


def test_recipe_without_a_claim_must_match_the_workload(recipe, tmp_path):
    nothing = claiming_nothing(recipe, recipe.baseline)
    with pytest.raises(RecipeError, match="but the recipe was made for"):
        found(of_workload(nothing, name="digits", fingerprint="sha256:11"), tmp_path / "other")
    changed = claiming_nothing(recipe, {**recipe.baseline, "prefetch": 2})
    with pytest.raises(RecipeError, match="against another baseline"):
        found(changed, tmp_path / "changed")


def claiming(recipe, value, half_width, *, min_gain=MIN_GAIN):
    """The recipe with another claim."""
    middle, half = math.log(value), half_width
    speedup = LogInterval(value=middle, low=middle - half, high=middle + half, count=5).ratio
    changes = {"speedup": speedup, "min_gain": min_gain}
    return recipe.model_copy(update={"evidence": recipe.evidence.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("more", "min_gain", "expected"),
    [
        (1.018, 0.02, ClaimResult.HOLDS),
        (1.018, 0.005, ClaimResult.WEAKER),
        (1.018, 0.5, ClaimResult.HOLDS),
        (1.1, 0.5, ClaimResult.WEAKER),  # however large a gain had to be, little may be lost
    ],
)
def test_the_smallest_gain_that_counts_is_the_recipes(recipe, tmp_path, more, min_gain, expected):
    claim = claiming(recipe, 1.5 * more, 0.001, min_gain=min_gain)
    assert found(claim, tmp_path, noise=0.0001).finding is expected


@pytest.mark.parametrize(
    ("claim", "speed", "noise", "expected", "reason"),
    [
        ((1.5, 0.05), 1.5, 0.01, ClaimResult.HOLDS, "both are gains, and they agree within their intervals"),
        ((1.5, 0.05), 1.3, 0.01, ClaimResult.WEAKER, "a gain over the baseline, but clearly less"),
        ((1.5, 0.05), 0.9, 0.01, ClaimResult.GONE, "this measurement shows no gain over the baseline"),
        ((1.02, 0.5), 0.97, 0.01, ClaimResult.UNDECIDED, "too wide to be refuted; tune again for longer"),
        ((1.018, 0.001), 0.9985, 0.0005, ClaimResult.UNDECIDED, "but does not refute the claim; give --budget"),
        ((1.2, 0.05), 1.15, 1.0, ClaimResult.UNDECIDED, "but does not refute the claim; give --budget"),
        ((8.3, 0.05), 30.0, 2.2, ClaimResult.UNDECIDED, "too uncertain to check the claim; give --budget"),
    ],
)
def test_each_finding_says_what_it_rests_on(recipe, tmp_path, claim, speed, noise, expected, reason):
    verification = found(claiming(recipe, *claim), tmp_path, speed=speed, noise=noise)
    assert verification.finding is expected, verification.reason
    assert reason in verification.reason


# ------------------------------------------------------------------------------------- the temporary directory


@pytest.fixture
def verify_simulated(recipe, monkeypatch, tmp_path):
    """`verify_simulated(…)`: `verify` itself on simulated trials, and the folder of its temporary files."""
    (tmp_path / "train.py").write_text("workload = None\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(verify_module, "fingerprint", lambda: MACHINE)

    def verified(made=recipe, observe=silent, **settings):
        trials = simulated_trials(faster_by(batch_size=1.5), **{"noise": 0.03, **settings})
        monkeypatch.setattr(verify_module, "LocalExecutor", lambda *_, **__: contextlib.nullcontext(trials))
        monkeypatch.setattr(verify_module, "time", SimpleNamespace(monotonic=trials.clock))
        return verify(made, str(tmp_path / "train.py"), observe=observe)

    return verified, temporary


def test_nothing_is_left_of_a_finding_that_names_no_log(verify_simulated):
    verified, temporary = verify_simulated
    assert verified().finding is ClaimResult.HOLDS
    assert list(temporary.iterdir()) == []


def test_the_log_of_what_is_unstable_stays(verify_simulated):
    verified, temporary = verify_simulated
    verification = verified(failure=out_of_memory)
    assert verification.finding is ClaimResult.UNSTABLE
    assert (place_in(verification.reason) / "result.json").is_file()
    assert place_in(verification.reason).is_relative_to(temporary)
    (folder,) = temporary.iterdir()
    with filelock.FileLock(folder / ".lock", blocking=False):
        pass  # nobody holds it any more


def test_the_log_of_a_baseline_that_fails_stays(verify_simulated):
    verified, temporary = verify_simulated
    with pytest.raises(NoStableConfigurationError) as failed:
        verified(failure=lambda configuration: TrialFailed(Outcome.CRASHED, "gone"))
    log = Path(re.search(r"Its log is (.+)\.$", failed.value.hint)[1])
    assert log.parent.is_dir()
    assert log.is_relative_to(temporary)


def interrupted(configuration):
    """Ctrl-C while the baseline warms up."""
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (KeyboardInterrupt, {"failure": interrupted}),
        (NoStableConfigurationError, {"failure": lambda _: TrialFailed(Outcome.OOM, "full", hint="Buy more.")}),
    ],
)
def test_nothing_is_left_of_an_end_that_names_no_log(verify_simulated, error, settings):
    verified, temporary = verify_simulated
    with pytest.raises(error):
        verified(**settings)
    assert list(temporary.iterdir()) == []


def test_nothing_is_left_of_a_refusal(verify_simulated, recipe):
    verified, temporary = verify_simulated
    with pytest.raises(RecipeError):
        verified(of_workload(recipe, name="digits", fingerprint="sha256:11"))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("made_for", "given", "expected"),
    [
        (("--width", "512"), None, ("--width", "512")),
        (("--width", "512"), ["--width", "9"], ("--width", "9")),
        ((), None, ()),
    ],
)
def test_a_recipes_workload_is_loaded_with_its_arguments(recipe, tmp_path, monkeypatch, made_for, given, expected):
    file = tmp_path / "train.py"
    file.write_text("workload = None\n")
    made = recipe.model_copy(update={"workload": recipe.workload.model_copy(update={"args": made_for})})
    watcher, seen = Watcher(), []

    def compare(invocation, recipe, **_):
        seen.append(invocation.reference.args)
        known = recipe.workload
        facts = SimpleNamespace(fingerprint=known.fingerprint, name=known.name, keras=known.keras)
        verify_module._compare_workloads(recipe, facts, invocation, may_be_imported=False)
        return Verification(finding=ClaimResult.HOLDS, claimed=None, measured=None, instances=0, reason="")

    monkeypatch.setattr(verify_module, "verify_with", compare)
    verify(made, file, args=given, observe=watcher)
    assert seen == [expected]
    told = " ".join(event.text for event in watcher.events if isinstance(event, Notice))
    assert ("the file's arguments are" in told) == bool(made_for)
    assert ("tuned with --width 512" in told) == (given is not None)


def test_verify_picks_this_machines_recipe_in_a_folder(verify_simulated, recipe, tmp_path, monkeypatch):
    verified, _ = verify_simulated
    monkeypatch.setattr(recipe_module, "fingerprint", lambda: MACHINE)
    elsewhere = recipe.model_copy(update={"machine": MACHINE.model_copy(update={"cores": 64})})
    (folder := tmp_path / "recipes").mkdir()
    elsewhere.with_baseline().save(folder / "elsewhere.json")
    recipe.save(folder / "here.json")
    watcher = Watcher()
    assert verified(folder, observe=watcher).claimed == recipe.evidence.speedup
    (text,) = [event.text for event in watcher.of(Notice) if "kind of machine" in event.text]
    assert text.startswith(f"{folder}/here.json was measured on this kind of machine")


@pytest.mark.parametrize("apart", [True, False])
def test_a_claim_is_wider_between_templates(monkeypatch, apart):
    given = []
    monkeypatch.setattr(verify_module, "claim_interval", lambda _, **how: given.append(how["different_template"]))
    trial = SimpleNamespace(configuration=FAST)
    leader = SimpleNamespace(instances=[[0.1], [0.2]], trial=trial, baseline_compilations=2)
    executor = SimpleNamespace(needs_different_template=lambda *sides: apart)
    measured_claim(leader, SimpleNamespace(executor=executor, baseline=BASELINE))
    assert given == [apart]
