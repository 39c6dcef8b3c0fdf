"""Whether claims hold: each recipe's speed-up against long, continuous, ordinary trainings of baseline and recipe.

    python benchmarks/claims.py [NAME...] [--quick] [--json FILE] [--recipes DIR] [--budget 100s] …

Prints one table. For each workload of `examples/` a real `autotune tune` makes a recipe. Then `plain_training.py`
trains with the baseline and with the recipe. A round is a fresh process of each, which take turns in ABBA order, each
turn one `fit` of many whole epochs; the other one has nothing to do meanwhile, and no iterator. A round gives one
log-ratio of samples per second, over all turns of either. Shorter rounds of more processes would spend most of the time
on importing and compiling, and longer turns would be further apart: this machine's speed wanders.

A claim *agrees* where it differs from the mean of the rounds by no more than chance explains: by the half-widths of
both 95% intervals, added as independent errors are. Wide intervals agree easily: the table shows both, and the *miss*
(the difference itself, in percent) has a bar of its own.

Where the recipe is the baseline, its ×1 claims nothing. Then what came closest, as the confirmation measured it, is the
claim that is put to the test; without such a one the workload is left out, and the table says so. A workload
that fails, in tuning or in training, counts as a claim that does not agree.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from figures import Figure, one, parser, report, share
from plain_training import READY

from autotune.data.errors import AutotuneError
from autotune.data.figures import LogInterval
from autotune.recipe.recipe import Recipe
from autotune.stats.intervals import mean_interval

ROOT = Path(__file__).resolve().parent.parent
TRAINING = Path(__file__).with_name("plain_training.py")
WORKLOADS = ("digits_mlp", "digits_cnn", "photos_jpeg", "source_transformer", "tabular_wide_deep")
BUDGET, BUDGET_QUICK = "100s", "35s"
ROUNDS, ROUNDS_QUICK = 4, 2
TURNS, TURNS_QUICK = 4, 2
SECONDS, SECONDS_QUICK = 10.0, 2.0
"""Shortest timed stretch of a turn; it ends with the epoch in which they are over."""
PATIENCE_SECONDS = 900.0
"""A training has failed whose imports, or one of whose turns, take longer."""
SHARE_BAR, MISS_BAR = 0.9, 0.03


class Failed(Exception):
    """A workload cannot be compared; the message says why in one line."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What two trainings took turns for: samples per second, and epochs, of all turns together."""

    baseline: float
    recipe: float
    baseline_epochs: int
    recipe_epochs: int

    @property
    def speedup(self) -> float:
        """The recipe's speed over the baseline's."""
        return self.recipe / self.baseline


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One workload's claim beside its long trainings.

    Args:
        claim: Logarithm of the claimed speed-up, with its interval; None where there is none.
        long: Mean of the rounds' log-ratios, with its interval; None where none was measured.
        rounds: What each round found.
        remark: What came in the way, or what the claim is where it is not the recipe's.
        counts: False where nothing is claimed, so that nothing can be wrong.
    """

    claim: LogInterval | None = None
    long: LogInterval | None = None
    rounds: Sequence[Round] = ()
    remark: str = ""
    counts: bool = True

    @property
    def miss(self) -> float | None:
        """By what share the longer of both speed-ups exceeds the other; None where one is missing."""
        if self.claim is None or self.long is None:
            return None
        return math.expm1(abs(self.claim.value - self.long.value))

    @property
    def agrees(self) -> bool:
        """Whether chance explains the difference: both intervals' half-widths added as independent errors are."""
        if self.claim is None or self.long is None or not math.isfinite(self.claim.half_width):
            return False
        allowed = math.hypot(self.claim.half_width, self.long.half_width)
        return abs(self.claim.value - self.long.value) <= allowed


def figures(comparisons: dict[str, Comparison]) -> dict[str, Figure]:
    """All figures of the table, by name, with their bars."""
    found = dict[str, Figure]()
    for name, comparison in comparisons.items():
        remark = f" ({comparison.remark})" if comparison.remark else ""
        found[f"{name}: claimed speed-up{remark}"] = speedup(comparison.claim)
        found[f"{name}: long speed-up"] = speedup(comparison.long)
        found[f"{name}: miss"] = one(comparison.miss, 1)
        found[f"{name}: agrees"] = one(float(comparison.agrees) if comparison.counts else None, 1)
    counted = [comparison for comparison in comparisons.values() if comparison.counts]
    misses = [comparison.miss for comparison in counted if comparison.miss is not None]
    if counted:
        agreeing = sum(comparison.agrees for comparison in counted)
        found["share of claims that agree"] = share(agreeing, len(counted), {"min": SHARE_BAR})
    found["median miss"] = one(statistics.median(misses) if misses else None, len(misses), {"max": MISS_BAR})
    return found


def speedup(interval: LogInterval | None) -> Figure:
    """The figure of a speed-up with its interval."""
    if interval is None:
        return one(None, 0)
    bounds = [math.exp(interval.low), math.exp(interval.high)] if math.isfinite(interval.half_width) else None
    return one(math.exp(interval.value), interval.count, ci95=bounds)


# ----------------------------------------------------------------------------------- tuning and training


def last_words(code: int, said: str) -> str:
    """Why a process failed, in one line."""
    return f"exit code {code}: {' '.join(said.strip().splitlines()[-2:])}"


def run(arguments: list[str]) -> None:
    """Run a Python process of its own; its last words are the reason where it fails."""
    ended = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise Failed(last_words(ended.returncode, ended.stderr or ended.stdout))


def tuned(file: Path, folder: Path, budget: str, trials: int | None) -> Recipe:
    """The recipe of a run that is in the folder already, or of one that is made now."""
    if not (folder / "recipe.json").exists():
        progress(f"{file.stem}: tuning for {budget}")
        options = ["--fresh", "--budget", budget, "--out", str(folder)]
        options += [] if trials is None else ["--trials", str(trials)]
        run(["-m", "autotune", "tune", str(file), *options])
    return Recipe.load(folder / "recipe.json")


def claim_of(recipe: Recipe) -> tuple[Recipe, Comparison]:
    """What is put to the test: the recipe, or what came closest, with its claim."""
    if recipe.changes:
        return recipe, Comparison(claim=recipe.evidence.speedup.log)
    best = recipe.candidate
    if best is None or best.speedup is None:
        return recipe, Comparison(remark="no gain claimed, nothing confirmed", counts=False)
    candidate = recipe.model_copy(update={"configuration": best.configuration})
    return candidate, Comparison(claim=best.speedup.log, remark="no gain claimed: what came closest")


class Training:
    """One ordinary training, in a fresh process that has imported everything and waits for its turns.

    Args:
        process: It, with pipes for input and output.
        errors: What it writes to stderr.
    """

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self.epochs = self.samples = 0
        self.seconds = 0.0
        self._process = process
        self._errors = errors
        self._given_up = False

    @property
    def rate(self) -> float:
        """Samples per second over all turns."""
        return self.samples / self.seconds

    def await_import(self) -> None:
        """Return when everything is imported."""
        self._said(lambda line: line.strip() == READY)

    def turn(self, seconds: float) -> None:
        """Train for so long, and some warm-up.

        Raises:
            Failed: It did not end well, or not in time.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: its last words say more
            os.write(self._process.stdin.fileno(), f"{seconds}\n".encode())
        timed = json.loads(self._said(lambda line: line.startswith('{"samples"')))
        self.epochs += timed["epochs"]
        self.samples += timed["samples"]
        self.seconds += timed["seconds"]

    def _said(self, wanted: Callable[[str], bool]) -> str:
        """The next line of its output that is wanted; others are a library's."""
        assert self._process.stdout is not None
        late = threading.Timer(PATIENCE_SECONDS, self._give_up)
        late.start()
        try:
            for line in self._process.stdout:
                if wanted(line):
                    return line
        finally:
            late.cancel()
        code = self._process.wait()
        if self._given_up:
            raise Failed(f"{TRAINING.name} said nothing for {PATIENCE_SECONDS:g} s")
        self._errors.seek(0)
        raise Failed(last_words(code, self._errors.read()))

    def _give_up(self) -> None:
        self._given_up = True
        self._process.kill()


@contextmanager
def training(*arguments: str) -> Iterator[Training]:
    """A process of `plain_training.py` with these arguments, which is killed in the end."""
    with (
        tempfile.TemporaryFile(mode="w+", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, str(TRAINING), *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Training(process, errors)
        finally:
            process.kill()


def trained_rounds(
    file: Path, recipe: Recipe, folder: Path, *, rounds: int, turns: int, seconds: float
) -> Iterator[Round]:
    """Round by round, each of two fresh processes."""
    name = file.stem
    files = {"baseline": folder / f"{name}-baseline.json", "recipe": folder / f"{name}-recipe.json"}
    recipe.model_copy(update={"configuration": recipe.baseline}).save(files["baseline"])
    recipe.save(files["recipe"])
    for number in range(rounds):
        with ExitStack() as stack:
            baseline, changed = (stack.enter_context(training(str(file), str(each))) for each in files.values())
            for each in (baseline, changed):
                each.await_import()
            for turn in range(number, number + turns):  # the next round begins with the other one
                for each in (baseline, changed) if turn % 2 == 0 else (changed, baseline):
                    each.turn(seconds)
            found = Round(
                baseline=baseline.rate,
                recipe=changed.rate,
                baseline_epochs=baseline.epochs,
                recipe_epochs=changed.epochs,
            )
        both = f"{found.baseline:,.0f} and {found.recipe:,.0f} samples/s"
        epochs = f"{found.baseline_epochs} and {found.recipe_epochs} epochs"
        progress(f"{name}: round {number + 1} of {rounds}: {both}, {epochs}, ×{found.speedup:.3f}")
        yield found


def compared(name: str, arguments: argparse.Namespace, recipes: Path, scratch: Path) -> Comparison:
    """Tune one workload and hold its claim against long trainings; a failure is a comparison that says so."""
    claim, rounds = None, list[Round]()
    try:
        file = ROOT / "examples" / f"{name}.py"
        recipe, comparison = claim_of(tuned(file, recipes / name, arguments.budget, arguments.trials))
        claim = comparison.claim
        if claim is None:
            progress(f"{name}: {comparison.remark}")
            return comparison
        progress(f"{name}: claimed {shown(claim)} {comparison.remark}")
        settings = {name: getattr(arguments, name) for name in ("rounds", "turns", "seconds")}
        rounds.extend(trained_rounds(file, recipe, scratch, **settings))
        long = mean_interval([math.log(each.speedup) for each in rounds])
        return replace(comparison, long=long, rounds=rounds)
    except (Failed, AutotuneError, OSError, ValueError) as error:
        progress(f"{name}: failed: {error}")
        return Comparison(claim=claim, rounds=rounds, remark=f"failed: {error}")


# --------------------------------------------------------------------------------------------- printing


def progress(line: str) -> None:
    """To stderr, so that stdout holds the table alone."""
    print(line, file=sys.stderr, flush=True)


def shown(interval: LogInterval | None) -> str:
    """A speed-up with the bounds of its interval."""
    if interval is None:
        return "–"
    return f"×{math.exp(interval.value):.3f} ({math.exp(interval.low):.3f} to {math.exp(interval.high):.3f})"


def parse_arguments() -> argparse.Namespace:
    """The command line, with the defaults that --quick changes filled in."""
    made = parser(__doc__)
    made.add_argument("names", nargs="*", metavar="NAME", help=f"all of {', '.join(WORKLOADS)} by default")
    made.add_argument("--budget", help=f"of each run of the tuner; {BUDGET} by default")
    made.add_argument("--trials", type=int, help="most trials of each search")
    made.add_argument("--rounds", type=int, help=f"fresh processes of each kind; {ROUNDS} by default")
    made.add_argument("--turns", type=int, help=f"of each process; {TURNS} by default")
    made.add_argument("--seconds", type=float, help=f"shortest timed stretch of a turn; {SECONDS:g} by default")
    made.add_argument("--recipes", type=Path, help="takes NAME/recipe.json from here, and leaves new runs here")
    arguments = made.parse_args()
    quick = arguments.quick
    arguments.names = arguments.names or list(WORKLOADS[:1] if quick else WORKLOADS)
    arguments.budget = arguments.budget or (BUDGET_QUICK if quick else BUDGET)
    arguments.rounds = arguments.rounds or (ROUNDS_QUICK if quick else ROUNDS)
    arguments.turns = arguments.turns or (TURNS_QUICK if quick else TURNS)
    arguments.seconds = arguments.seconds or (SECONDS_QUICK if quick else SECONDS)
    unknown = set(arguments.names) - set(WORKLOADS)
    if unknown:
        made.error(f"no such workload: {', '.join(sorted(unknown))}")
    if arguments.rounds < 2 or arguments.turns < 1:
        made.error("--rounds must be 2 or more, --turns 1 or more")
    return arguments


def main() -> None:
    """Tune, train, print, and write."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        recipes = (arguments.recipes or scratch).resolve()
        comparisons = {name: compared(name, arguments, recipes, scratch) for name in arguments.names}
    rounds = {name: [asdict(each) for each in comparison.rounds] for name, comparison in comparisons.items()}
    report("claims", figures(comparisons), arguments.json, {"rounds": rounds})


if __name__ == "__main__":
    main()
