"""Is the trained model there sooner? Five unmodified scripts, tuned once and trained to the same held-out loss.

    python benchmarks/learning.py [--only NAME]... [--larger-batch] [--runs DIR] [--quick] [--json FILE]

The scripts are those of `learning/`. Each is tuned once by `autotune tune`. Then it is trained for its own number of
epochs by itself and with the recipe, in turns, with five seeds each. `held_out_losses.py` notes when epochs end.

The target is the best held-out loss that the median seed of the script has reached after 60% of its epochs. The real
ratio is the time to the target without the recipe over that with it, of the same seed. Times count neither the start of
the process nor compilation, which a long training does not feel. One figure has them in.

With `--larger-batch`, a larger batch that was measured and is not recommended is trained, too.

The examples that larger batches need are also predicted for the public convergence points of MLPerf, from the two
smallest batch sizes of each set (`data/mlperf_convergence.json`).

Prints one table. The file of `--json` is written after each step, and a benchmark that was killed goes on from there.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from answers import progress, tune
from figures import Figure, factor, median, one, parser, report, write

from autotune.data.options import seconds_of
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration
from autotune.stats.same_loss import log_examples, over_critical_of

HERE = Path(__file__).resolve().parent
SCRIPTS, TRAINING, CONVERGENCE = HERE / "learning", HERE / "held_out_losses.py", HERE / "data/mlperf_convergence.json"
TUNING_SEEDS = {"digits_mlp": 211, "convnet": 212, "text_classifier": 213, "lstm": 214, "wide_deep": 215}
BUDGET, BUDGET_QUICK = "3m", "90s"
SEEDS, SEEDS_QUICK = (1, 2, 3, 4, 5), (1, 2)
EPOCHS_QUICK = "20"
TARGET_AT = 0.6
"""Share of the epochs after which the median seed of the baseline has reached the target."""
BASELINE, RECOMMENDED, SAME, LARGER = "baseline", "recommended", "same training", "larger batch"
WITHIN_BAR, LATER_BAR, SHARE_BAR = {"min": 4.0}, {"max": 0.0}, {"max": 0.25}

Curve = Sequence[Sequence[float]]
"""The seconds at the end of each epoch since the process was asked for, and the held-out loss then."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a run of `autotune tune` recommends.

    Args:
        verdict: `none` if there is no recipe.
        kind: `same training` or `larger batch`; `baseline` if the recipe changes nothing.
        changes: What the recipe changes.
        claim: The claimed ratio of times to the same loss, and its interval; None for the baseline.
        larger_claim: The same of a larger batch that was measured and is not recommended.
        learning_share: Of the budget, that comparing losses to recommend a batch size took.
    """

    verdict: str
    kind: str
    changes: dict[str, Any]
    claim: Sequence[float] | None
    larger_claim: Sequence[float] | None
    learning_share: float


@dataclass
class Results:
    """All that was measured so far.

    Args:
        file: Where it is kept; nowhere if None.
        tuned: By script.
        trained: By script and side: the trainings, in the order of the seeds.
    """

    file: Path | None
    tuned: dict[str, Tuned] = field(default_factory=dict)
    trained: dict[str, dict[str, list[Curve]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what the file holds, if there is one."""
        if self.file is not None and self.file.exists():
            found = json.loads(self.file.read_text(encoding="utf-8"))
            self.tuned = {name: Tuned(**tuned) for name, tuned in found["tuned"].items()}
            self.trained = found["trained"]

    @property
    def parts(self) -> dict[str, Any]:
        """The part of the file that is read again."""
        return {"tuned": {name: asdict(tuned) for name, tuned in self.tuned.items()}, "trained": self.trained}

    def save(self) -> None:
        """Write the file."""
        write("learning", figures(self), self.file, self.parts)


# ------------------------------------------------------------------------------------------- time to a loss


def without_start(curve: Curve) -> Curve:
    """Return a training as if its first epoch had lasted as long as the median of the later ones."""
    lengths = [after - before for (before, _), (after, _) in itertools.pairwise(curve)]
    late = curve[0][0] - statistics.median(lengths)
    return [(seconds - late, loss) for seconds, loss in curve]


def target_loss(curves: Sequence[Curve]) -> float:
    """Return the best loss that the median training has reached after `TARGET_AT` of its epochs."""
    return statistics.median(min(loss for _, loss in curve[: math.ceil(TARGET_AT * len(curve))]) for curve in curves)


def seconds_to(curve: Curve, target: float) -> float | None:
    """Return when a training first reaches a loss, on a line between the ends of epochs; None if it does not."""
    before, best = 0.0, math.inf
    for seconds, loss in curve:
        if loss <= target:
            part = 1.0 if math.isinf(best) else (best - target) / (best - loss)
            return before + part * (seconds - before)
        before, best = seconds, min(best, loss)
    return None


def log_ratios(baseline: Sequence[Curve], other: Sequence[Curve], target: float) -> list[float] | None:
    """Return the logarithms of times to a loss, baseline over other, by seed; None if a seed of the other misses it.

    A seed of the baseline that misses it counts with all of its time, so its ratio is at least that.
    """
    ratios = list[float]()
    for own, others in zip(baseline, other, strict=False):
        needed = seconds_to(others, target)
        if needed is None:
            return None
        ratios.append(math.log((seconds_to(own, target) or own[-1][0]) / needed))
    return ratios


# ---------------------------------------------------------------------------------------------- the figures


def figures(results: Results) -> dict[str, Figure]:
    """Return all figures of the table, by name, with their bars."""
    found = dict[str, Figure]()
    for name, tuned in results.tuned.items():
        found |= _of_script(name, tuned, results.trained.get(name, {}))
    sets = json.loads(CONVERGENCE.read_text(encoding="utf-8"))["sets"]
    return found | _of_all(results) | convergence_figures(sets)


def _of_script(name: str, tuned: Tuned, trained: dict[str, list[Curve]]) -> dict[str, Figure]:
    """Return the figures of a script."""
    found = {f"{name}: claim, {tuned.verdict}, {tuned.kind}": _claim(tuned.claim)}
    if trained.get(RECOMMENDED) and tuned.claim is not None:
        found[f"{name}: real ratio of times to the loss"] = _ratio(trained, RECOMMENDED)
        found[f"{name}: the same with start and compilation"] = _ratio(trained, RECOMMENDED, start=True)
        found[f"{name}: held-out loss after its epochs, over the baseline's"] = _last_losses(trained, RECOMMENDED)
    if trained.get(LARGER):
        found[f"{name}: claim, larger batch, not recommended"] = _claim(tuned.larger_claim)
        found[f"{name}: real ratio of the larger batch"] = _ratio(trained, LARGER)
        found[f"{name}: held-out loss of the larger batch, over the baseline's"] = _last_losses(trained, LARGER)
    return found


def _of_all(results: Results) -> dict[str, Figure]:
    """Return the figures over all scripts whose recipe changes something."""
    names = [
        name for name, tuned in results.tuned.items() if tuned.claim and results.trained.get(name, {}).get(RECOMMENDED)
    ]
    within = overlapping = later = 0
    for name in names:
        _, low, high = results.tuned[name].claim or (1.0, 1.0, 1.0)
        real = _ratio(results.trained[name], RECOMMENDED)
        within += real["value"] is not None and low <= real["value"] <= high
        overlapping += real["ci95"] is not None and real["ci95"][0] <= high and low <= real["ci95"][1]
        later += real["value"] is None or real["value"] < 1
    is_whole = len(results.tuned) == len(TUNING_SEEDS)
    found = {
        "real ratio lies in the claimed interval": one(within, len(names), WITHIN_BAR if is_whole else None),
        "real and claimed interval overlap": one(overlapping, len(names)),
        "recommended reaches the loss later than the baseline": one(later, len(names), LATER_BAR),
    }
    for kind in (SAME, LARGER):
        trained = [results.trained[name] for name in names if results.tuned[name].kind == kind]
        good = sum(is_no_worse(sides, RECOMMENDED) for sides in trained)
        bar = {"min": float(len(trained))} if kind == SAME and trained else None
        found[f"held-out loss no worse than the baseline's seeds, {kind}"] = one(good, len(trained), bar)
    shares = [tuned.learning_share for tuned in results.tuned.values()]
    found["largest share of a budget spent on learning"] = one(max(shares, default=None), len(shares), SHARE_BAR)
    return found


def _claim(claim: Sequence[float] | None) -> Figure:
    return one(None, 0) if claim is None else one(claim[0], 1, ci95=list(claim[1:]))


def _ratio(trained: dict[str, list[Curve]], side: str, *, start: bool = False) -> Figure:
    """Return the real ratio of times to the target; without a value if a seed does not reach it."""
    curves = {name: trained[name] for name in (BASELINE, side)}
    target = target_loss(curves[BASELINE])
    if not start:
        curves = {name: [without_start(curve) for curve in found] for name, found in curves.items()}
    ratios = log_ratios(curves[BASELINE], curves[side], target)
    return one(None, len(curves[side])) if ratios is None else factor(ratios)


def _last_losses(trained: dict[str, list[Curve]], side: str) -> Figure:
    pairs = zip(trained[side], trained[BASELINE], strict=False)
    return factor([math.log(other[-1][1] / own[-1][1]) for other, own in pairs])


def is_no_worse(trained: dict[str, list[Curve]], side: str) -> bool:
    """Return whether the mean of the last losses is within those of the baseline's seeds, or below them."""
    other, own = ([curve[-1][1] for curve in trained[name]] for name in (side, BASELINE))
    return statistics.fmean(other) <= max(own)


# ------------------------------------------------------------------------------- public convergence points


def predicted_log_examples(needed: Sequence[Sequence[float]]) -> list[float]:
    """Return the logarithms of the examples that each batch size after the second needs, from the first two.

    Args:
        needed: Batch sizes and the examples or epochs that they need, from the smallest on.
    """
    (small, first), (next_one, second) = needed[:2]
    over_critical = over_critical_of(math.log(second / first), next_one / small)
    return [math.log(first) + log_examples(size / small, over_critical) for size, _ in needed[2:]]


def convergence_figures(sets: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """Return how well two batch sizes predict the examples that larger ones need."""
    errors, unchanged = list[float](), list[float]()
    for found in sets:
        predictions = predicted_log_examples(found["needed"])
        for (_, actual), predicted in zip(found["needed"][2:], predictions, strict=True):
            errors.append(abs(math.exp(predicted) / actual - 1))
            unchanged.append(abs(found["needed"][0][1] / actual - 1))
    where = f"examples needed by larger batches, {len(sets)} sets of MLPerf"
    return {
        f"{where}: relative error, median": median(errors),
        f"{where}: the same if all needed as many": median(unchanged),
    }


# ------------------------------------------------------------------------------------------------ measuring


def tune_script(name: str, run: Path, budget: str) -> Tuned:
    """Tune a script, and return what its run directory says."""
    shutil.rmtree(run, ignore_errors=True)  # a killed benchmark left it
    run.parent.mkdir(parents=True, exist_ok=True)
    command = tune(SCRIPTS / f"{name}.py", budget, TUNING_SEEDS[name], run)
    trials = [json.loads(file.read_text()) for file in sorted(run.glob("trials/*/result.json"))]
    taken = sum(trial["branch"]["seconds"] for trial in trials if trial.get("branch"))
    share = taken / seconds_of("budget", budget)
    if not (run / "recipe.json").exists():
        progress(f"{name}: exit code {command.exit_code} {command.remark}")
        empty: dict[str, Any] = {"claim": None, "larger_claim": None, "changes": {}}
        return Tuned(verdict="none", kind=BASELINE, learning_share=share, **empty)
    recipe = Recipe.load(run / "recipe.json")
    kind = BASELINE
    if recipe.changes:
        same = Configuration(recipe.configuration).update_size == Configuration(recipe.baseline).update_size
        kind = SAME if same else LARGER
    is_other = kind != LARGER and recipe.larger_batch is not None
    return Tuned(
        verdict=recipe.evidence.verdict.value,
        kind=kind,
        changes=dict(recipe.changes),
        claim=claim_of(recipe) if recipe.changes else None,
        larger_claim=claim_of(recipe.with_larger_batch()) if is_other else None,
        learning_share=share,
    )


def claim_of(recipe: Recipe) -> list[float] | None:
    """Return what a recipe claims of times to the same loss, with its interval; None where that was not measured."""
    found, rule = recipe.evidence.speedup, recipe.learning_rate_rule
    if rule is not None:
        if rule.same_loss is None:
            return None
        found = rule.same_loss.speedup
    return [found.value, found.low, found.high]


def train(name: str, recipe: str, arguments: Sequence[str]) -> Curve:
    """Train once in a fresh process, and return when epochs ended, since then, with their losses."""
    command = [sys.executable, str(TRAINING), recipe, str(SCRIPTS / f"{name}.py"), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{name}: a training failed: {' '.join(ended.stderr.strip().splitlines()[-3:])}")
    return [(at - began, loss) for at, loss in json.loads(ended.stdout.splitlines()[-1])]


def recipes(results: Results, name: str, run: Path, *, larger: bool) -> dict[str, str]:
    """Return the recipe's file of each side that is to be trained; `-` is the script by itself."""
    tuned, sides = results.tuned[name], {BASELINE: "-"}
    if tuned.claim is not None:
        sides[RECOMMENDED] = str(run / "recipe.json")
    if larger and tuned.larger_claim is not None:
        sides[LARGER] = str(run / "larger_batch.json")
        Recipe.load(run / "recipe.json").with_larger_batch().save(sides[LARGER])
    return sides if len(sides) > 1 else {}


def measure(results: Results, given: argparse.Namespace, runs_directory: Path) -> None:
    """Measure all that is not in the results yet."""
    seeds, budget = (SEEDS_QUICK, BUDGET_QUICK) if given.quick else (SEEDS, BUDGET)
    for name in given.only:
        run = runs_directory / name
        if name not in results.tuned:
            results.tuned[name] = tune_script(name, run, budget)
            results.save()
            progress(f"{name}: {results.tuned[name]}")
        sides = recipes(results, name, run, larger=given.larger_batch)
        trained = results.trained.setdefault(name, {})
        for place, seed in enumerate(seeds):
            arguments = ["--seed", str(seed), *(["--epochs", EPOCHS_QUICK] if given.quick else [])]
            for side in list(sides) if place % 2 == 0 else reversed(sides):
                if len(trained.setdefault(side, [])) > place:
                    continue
                curve = train(name, sides[side], arguments)
                trained[side].append(curve)
                results.save()
                progress(f"{name}: seed {seed}, {side}: {curve[-1][0]:.1f} s, held-out loss {curve[-1][1]:.4f}")


def main() -> None:
    """Measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=list(TUNING_SEEDS), help="a script; all by default")
    made.add_argument("--larger-batch", action="store_true", help="train larger batches that are not recommended, too")
    made.add_argument("--runs", type=Path, help="keep the run directories here; beside the JSON file by default")
    given = made.parse_args()
    given.only = given.only or (["digits_mlp"] if given.quick else list(TUNING_SEEDS))
    results = Results(given.json)
    with tempfile.TemporaryDirectory() as scratch:
        directory: Path = given.runs or (given.json.with_suffix(".runs") if given.json else Path(scratch))
        measure(results, given, directory.resolve())
    report("learning", figures(results), given.json, results.parts)


if __name__ == "__main__":
    main()
