"""Energy: what a trial's cards took for a sample, and runs whose objective it is."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from simulated_runs import (
    MACHINE,
    MemoryDirectory,
    a_slice,
    an_invocation,
    faster_by,
    go_on,
    on_disk,
    quick_tune,
    simulated_trials,
    tune_simulated,
)

from autotune.data.errors import ArgumentError
from autotune.data.facts import Gpu, GpuUse
from autotune.data.record import Outcome, Phase
from autotune.front.results import show_answer
from autotune.report.history import load_history
from autotune.stats.deciding import ClaimResult, Verdict
from autotune.stats.disturbance import gpu_figures
from autotune.stats.ratios import EpochCost, compared_rate
from autotune.stats.stability import THROTTLING
from autotune.tuning.costs import LONG_SLICE_SECONDS
from autotune.tuning.verify import verify_with

CARD = Gpu(name="NVIDIA H200", memory_bytes=150754820096, compute_capability="9.0")
HAS_GPU = MACHINE.model_copy(update={"gpus": (CARD,)})
SPEED = faster_by(jit_compile=1.5)


def figures_of(slices, samples_per_second):
    """The figures of a trial with these slices and this throughput."""
    rate = None if samples_per_second is None else SimpleNamespace(value=samples_per_second)
    return gpu_figures(SimpleNamespace(own_slices=slices, throughput=rate))


def watts(configuration):
    """XLA is fast and draws twice as much; eight steps a call are no faster and draw seven tenths."""
    drawn = 400.0 * (2.0 if configuration["jit_compile"] is True else 1.0)
    return drawn * (0.7 if configuration["steps_per_execution"] == 8 else 1.0)


def card(configuration, seconds, **more):
    """What NVML tells of a card with that power."""
    drawn = watts(configuration)
    return (GpuUse(watts=drawn, joules=drawn * seconds, limited_by=(), others=0, foreign_utilisation=0.0, **more),)


def trials_with(cards=card, **settings):
    """Simulated trials on a card that tells of its energy."""
    return simulated_trials(SPEED, noise=0.01, gpus=("NVIDIA H200",), cards=cards, **settings)


def tuned(path, objective, trials=None):
    """Recipe and directory of a run with this objective."""
    return quick_tune(trials or trials_with(), path, machine=HAS_GPU, objective=objective)


@pytest.fixture(scope="module")
def for_energy(tmp_path_factory):
    """Recipe and directory of a run for energy."""
    return tuned(tmp_path_factory.mktemp("energy"), "energy")


def in_use(*cards, seconds=2.0, rate=4000.0):
    """A slice with such cards."""
    return a_slice(rate, seconds=seconds).model_copy(update={"gpus": cards})


def test_each_objective_finds_its_own_winner(tmp_path, for_energy):
    fast, _ = tuned(tmp_path, "throughput")
    economical, directory = for_energy
    assert fast.changes["jit_compile"] is True
    assert economical.changes["steps_per_execution"] == 8
    assert "jit_compile" not in economical.changes
    evidence = economical.evidence
    assert (fast.evidence.objective, evidence.objective) == ("throughput", "energy")
    assert evidence.speedup.low <= 1 / 0.7 <= evidence.speedup.high
    assert evidence.baseline_joules_per_sample == pytest.approx(0.1, rel=0.02)
    assert evidence.joules_per_sample == pytest.approx(0.07, rel=0.02)
    assert evidence.throughput.value == pytest.approx(4000, rel=0.02)
    confirmed = [each for each in directory.trials.values() if each.phase is Phase.CONFIRM and each.pairs]
    assert confirmed[-1].speedup.value == pytest.approx(1 / 0.7, rel=0.05)


def test_the_claim_says_what_is_less(tmp_path, for_energy):
    recipe, _ = for_energy
    said = recipe.answer.headline
    assert said.startswith(f"Less energy: {recipe.evidence.speedup.shown()} in samples per joule")
    output = io.StringIO()
    show_answer(recipe.answer, tmp_path / "recipe.json", Console(file=output, width=120))
    (line,) = [line for line in output.getvalue().splitlines() if "energy/sample" in line]
    before, unit, after, same_unit = line.split()[1:]
    assert (float(before), float(after)) == (pytest.approx(100, rel=0.02), pytest.approx(70, rel=0.02))
    assert (unit, same_unit) == ("mJ", "mJ")


@pytest.mark.parametrize(
    ("verdict", "words"),
    [(Verdict.UNSTABLE, "every more economical candidate"), (Verdict.NO_SIGNIFICANT_GAIN, "in energy per sample")],
)
def test_what_was_not_found_is_said_of_energy_too(for_energy, verdict, words):
    recipe, _ = for_energy
    for objective in ("energy", "throughput"):
        changes = {"verdict": verdict, "excluded_gain": 0.05, "objective": objective}
        said = recipe.model_copy(update={"evidence": recipe.evidence.model_copy(update=changes)}).answer.headline
        assert (words in said) == (objective == "energy")


@pytest.mark.parametrize(
    ("machine", "cards"), [(MACHINE, card), (HAS_GPU, lambda *_: (GpuUse(watts=80.0),)), (HAS_GPU, lambda *_: ())]
)
def test_without_energy_the_objective_is_refused_at_the_start(tmp_path, machine, cards):
    trials = trials_with(cards)
    with pytest.raises(ArgumentError, match="reports its energy"):
        quick_tune(trials, tmp_path / "run", machine=machine, objective="energy")
    assert len(trials.launched) == (0 if machine is MACHINE else 1)


@pytest.mark.slow
def test_a_run_for_energy_goes_on_as_one(tmp_path):
    with on_disk(tmp_path / "run") as directory:
        run = directory.read_run()
        directory.write_run(run.model_copy(update={"machine": HAS_GPU, "arguments": {"objective": "energy"}}))
        tune_simulated(trials_with(), directory, machine=HAS_GPU, objective="energy", budget=60.0)
    recipe = go_on(trials_with(), tmp_path / "run", machine=HAS_GPU, objective="energy", budget=300.0)
    assert recipe.changes["steps_per_execution"] == 8
    frame = load_history(tmp_path / "run")
    assert set(frame["objective"]) == {"energy"}
    slow = frame[frame["jit_compile"] & frame["speedup"].notna()]
    assert (slow["speedup"] < 1.2).all()  # of throughputs they would be 1.5
    assert frame.loc[0, "joules_per_sample"] == pytest.approx(0.1, rel=0.02)
    assert frame.loc[0, "gpu_power_watts"] == pytest.approx(400.0)


def test_a_claim_on_energy_is_verified_by_energy(tmp_path, for_energy):
    invocation = an_invocation(
        trials_with(seed=1), MemoryDirectory(tmp_path), machine=HAS_GPU, objective="energy", budget=200.0
    )
    assert verify_with(invocation, for_energy[0]).finding is ClaimResult.HOLDS


@pytest.mark.parametrize(("fit", "share"), [(2, 0.9), (1, 0.7)])
def test_slices_are_long_where_energy_is_compared(tmp_path, fit, share):
    trials = trials_with(examples=None, fits_together=lambda alive: len(alive) <= fit)
    _, directory = quick_tune(trials, tmp_path, machine=HAS_GPU, objective="energy")
    for phase in (Phase.SEARCH, Phase.CONFIRM):
        pairs = [pair for each in directory.trials.values() if each.phase is phase for pair in each.pairs]
        assert min(pair.candidate.seconds for pair in pairs) >= share * LONG_SLICE_SECONDS


def test_the_energy_between_epochs_counts_at_the_slices_power():
    each = in_use(GpuUse(joules=800.0))
    assert compared_rate(each, EpochCost(), "energy") == pytest.approx(10.0)
    assert compared_rate(each, EpochCost(examples=1000, seconds=0.25), "energy") == pytest.approx(5.0)
    assert compared_rate(each, EpochCost(examples=1000, seconds=0.25), "throughput") == pytest.approx(2000.0)
    charged = each.model_copy(update={"charged_seconds": each.seconds})
    assert compared_rate(charged, EpochCost(), "throughput") == compared_rate(each, EpochCost(), "throughput") / 2
    assert compared_rate(charged, EpochCost(), "energy") == pytest.approx(5.0)
    assert compared_rate(in_use(GpuUse()), EpochCost(), "energy") is None


def test_the_figures_are_of_all_cards():
    one = GpuUse(joules=800.0, utilisation=0.9, sm_mhz=900, most_sm_mhz=1000, celsius=70, limited_by=("thermal",))
    other = GpuUse(joules=400.0, utilisation=0.7, sm_mhz=1000, most_sm_mhz=1000, celsius=60, limited_by=())
    assert figures_of([in_use(one, other)], 3000.0) == {
        "joules_per_sample": pytest.approx(0.2),
        "gpu_power_watts": pytest.approx(600.0),
        "gpu_utilisation": pytest.approx(0.8),
        "gpu_memory_utilisation": None,
        "gpu_sm_clock_share": pytest.approx(0.95),
        "gpu_temperature": 70,
        "gpu_slowed_share": 1.0,
    }


def test_power_without_energy_is_no_energy():
    figures = figures_of([in_use(GpuUse(watts=80.0))], 4000.0)
    assert (figures["gpu_power_watts"], figures["joules_per_sample"]) == (80.0, None)
    unlike = [in_use(GpuUse(watts=80.0), seconds=1.0), in_use(GpuUse(watts=20.0), seconds=3.0)]
    assert figures_of(unlike, 4000.0)["gpu_power_watts"] == 35.0  # the mean over time
    still = figures_of([in_use(GpuUse(joules=800.0)), in_use(GpuUse(joules=0.0))], 4000.0)
    assert still["gpu_power_watts"] == 200.0  # the counter had not been brought up to date within a slice
    assert set(figures_of([a_slice()], 4000.0).values()) == {None}
    assert set(figures_of([], None).values()) == {None}


@pytest.mark.slow
def test_a_hot_winner_is_said_to_be_one(tmp_path):
    def hot(configuration, seconds):
        return tuple(each.model_copy(update={"limited_by": ("thermal",)}) for each in card(configuration, seconds))

    def heats(configuration, seconds):
        return (hot if configuration["jit_compile"] is True else card)(configuration, seconds)

    recipe, _ = tuned(tmp_path / "hot", "throughput", trials_with(hot))
    (check,) = [check for check in recipe.evidence.stability.checks if check.name == THROTTLING]
    assert (check.passed, check.value) == (True, 1.0)
    output = io.StringIO()
    show_answer(recipe.answer, tmp_path / "recipe.json", Console(file=output, width=200))
    assert f"Note: throttling: {check.detail}" in " ".join(output.getvalue().split())
    assert not any("throttling" in each for each in recipe.evidence.stability.not_checked)
    refused, directory = tuned(tmp_path / "heats", "throughput", trials_with(heats))
    assert "jit_compile" not in refused.changes
    reasons = [each.reason for each in directory.trials.values() if each.outcome is Outcome.UNSTABLE]
    assert any(reason.startswith("throttling: ") for reason in reasons)
