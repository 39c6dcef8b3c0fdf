"""Scripts as their users wrote them, tuned unmodified: does each get a recipe, and does its claim hold in the long run?

    python benchmarks/scripts.py [--only NAME] [--budget 90s] [--json FILE] [--runs DIR]

Each script of `tests/scripts` runs once by itself, so that its data exists. The digest of its directory is taken
before and after `autotune tune`, which is resumed once if it ends undecided. Then plain and tuned long runs follow each
other (plain, tuned, tuned, plain). What epochs take is the difference between a long and a short run: starts and
compilations cancel out. A claim and a long run agree where their intervals overlap.
"""

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Figure, factor, one, parser, report, share

from autotune.data.figures import Interval
from autotune.recipe.recipe import Recipe
from autotune.stats.deciding import Verdict

SCRIPTS = Path(__file__).parents[1] / "tests" / "scripts"
ROUNDS = 2
LONG_SECONDS = 20.0
"""What the epochs by which a long run is longer shall take with the recipe and without, on average."""
TIMER_ERROR = 0.4
"""Seconds by which the starts of two processes differ."""
MOST_SPREAD = 4.0
"""The largest factor between the ends of a long run's interval that says anything."""
AGREEING_BAR = 0.85


@dataclass(frozen=True)
class Script:
    """A script, and how its epochs are set: by an argument, or by a constant in its source."""

    name: str
    epochs: str  # `--epochs`, or a pattern whose group is the number
    edit: tuple[str, str] | None = None  # of what would end a long run early

    def source(self, epochs: int) -> str:
        """Its text, with that many epochs."""
        text = (SCRIPTS / f"{self.name}.py").read_text(encoding="utf-8")
        if self.edit:
            assert self.edit[0] in text, self.name
            text = text.replace(*self.edit)
        if self.epochs.startswith("--"):
            return text
        changed, count = re.subn(self.epochs, lambda found: found.group(0).replace(found.group(1), str(epochs)), text)
        assert count == 1, (self.name, count)
        return changed

    def arguments(self, epochs: int) -> list[str]:
        """Its arguments, with that many epochs."""
        return [self.epochs, str(epochs)] if self.epochs.startswith("--") else []


CASES = (
    Script("mlp_numpy", "--epochs", ("patience=6", "patience=1000000")),
    Script("functional_tfdata", r"EPOCHS = (\d+)"),
    Script("custom_train_step", r"epochs=(\d+)"),
    Script("gradient_tape_loop", "--epochs"),
    Script("gan", r"EPOCHS = (\d+)"),
    Script("vae", "--epochs"),
    Script("transfer_learning", r"FINE_TUNE_EPOCHS = (\d+)"),
    Script("text_classification", r"epochs = (\d+)"),
    Script("lstm_timeseries", "--epochs", ("patience=5", "patience=1000000")),
    Script("multi_output", r"epochs=(\d+)"),
    Script("train_generator", "--epochs"),
    Script("tfrecord_train", "--epochs"),
    Script("image_folder", r"epochs = (\d+)"),
    Script("imbalanced", r"EPOCHS = (\d+)", ("patience=5", "patience=1000000")),
    Script("mirrored_fit", "--epochs"),
    Script("mirrored_custom", r"EPOCHS = (\d+)"),
    Script("train_on_batch", "--epochs"),
    Script("numpy_tape", r"training_epochs = (\d+)"),
    Script("keras2_functional", r"EPOCHS = (\d+)"),
    Script("keras2_sequence", "--epochs"),
    Script("keras2_train_step", r"epochs=(\d+)"),
    Script("keras2_gan", r"EPOCHS = (\d+)"),
    Script("keras2_imbalanced", r"epochs=(\d+)", ("patience=5", "patience=1000000")),
    Script("keras2_mirrored", "--epochs"),
    Script("keras2_probability", r"epochs=(\d+)"),
    Script("keras2_two_tower", r"epochs=(\d+)"),
)


def digest(folder: Path) -> str:
    """Of all files below a directory: names, contents."""
    whole = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        whole.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()


def seconds_of(command: list[str], folder: Path, log: Path) -> float:
    """How long a command takes that must succeed."""
    began = time.perf_counter()
    with log.open("ab") as output:
        subprocess.run(
            [sys.executable, *command], cwd=folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=True
        )
    return time.perf_counter() - began


class Measured:
    """One script, tuned and trained."""

    def __init__(self, script: Script, budget: str, kept: Path) -> None:
        self.script, self._budget, self._run = script, budget, kept / script.name
        self._log = kept / f"{script.name}.log"

    def all(self) -> dict[str, Any]:
        """Tune, and train in turns."""
        with tempfile.TemporaryDirectory(prefix="script-") as made:
            folder = Path(made)
            for path in SCRIPTS.glob("*.py"):
                shutil.copy(path, folder)
            self._write(folder, 1)
            alone = seconds_of([self._name, *self.script.arguments(1)], folder, self._log)
            before = digest(folder)
            shutil.rmtree(self._run, ignore_errors=True)
            began = time.perf_counter()
            try:
                recipe = self._tuned(folder, "--fresh", "--out", str(self._run))
                if recipe.evidence.verdict is Verdict.UNDECIDED:
                    recipe = self._tuned(folder, "--resume", str(self._run))
            except subprocess.CalledProcessError as error:
                return {"script": self.script.name, "verdict": f"exit code {error.returncode}"}
            found: dict[str, Any] = {"script": self.script.name, "tuning_seconds": time.perf_counter() - began}
            claim = recipe.evidence.speedup
            found |= {
                "verdict": recipe.evidence.verdict.value,
                "unchanged": digest(folder) == before,
                "changes": dict(recipe.changes),
                "claim": [claim.value, claim.low, claim.high],
                "alone_seconds": alone,
            }
            if recipe.changes:
                found |= self._long_runs(folder, claim)
            return found

    def _tuned(self, folder: Path, *more: str) -> Recipe:
        """Tune the script for the budget. Raises CalledProcessError."""
        tune = ["-m", "autotune", "tune", self._name, *more, "--budget", self._budget]
        seconds_of([*tune, "--", *self.script.arguments(1)], folder, self._log)
        return Recipe.load(self._run / "recipe.json")

    def _write(self, folder: Path, epochs: int) -> None:
        (folder / self._name).write_text(self.script.source(epochs), encoding="utf-8")

    @property
    def _name(self) -> str:
        return f"{self.script.name}.py"

    def _epochs_take(self, folder: Path, few: int, more: int, recipe: bool) -> float:
        """Seconds of `more` epochs, as a difference."""
        taken = []
        for epochs in (few, few + more):
            self._write(folder, epochs)
            run = ["-m", "autotune", "run", str(self._run / "recipe.json")] if recipe else []
            taken.append(seconds_of([*run, self._name, *self.script.arguments(epochs)], folder, self._log))
        return max(1e-3, taken[1] - taken[0])

    def _long_runs(self, folder: Path, claim: Interval) -> dict[str, Any]:
        few, more = 2, 4
        while (pace := self._epochs_take(folder, few, more, recipe=False) / more) * more < LONG_SECONDS / 3:
            if more >= 4096:
                break
            more *= 4
        more = max(2, math.ceil(2 * LONG_SECONDS / (pace * (1 + 1 / claim.value))))
        logs = []
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for index in range(ROUNDS):
            for recipe in (False, True) if index % 2 == 0 else (True, False):
                seconds[recipe].append(self._epochs_take(folder, few, more, recipe))
            logs.append(math.log(seconds[False][-1] / seconds[True][-1]))
        ratio = math.exp(sum(logs) / len(logs))
        fastest = min(seconds[True])
        error = max(abs(logs[0] - logs[-1]) / 2, TIMER_ERROR * math.sqrt(2) / fastest)
        low, high = ratio * math.exp(-error), ratio * math.exp(error)
        if high > MOST_SPREAD * low:  # it would agree with anything
            return {"epochs": more, "seconds": {str(key): each for key, each in seconds.items()}}
        agrees = low <= claim.high and claim.low <= high
        return {
            "epochs": more,
            "seconds": {str(key): each for key, each in seconds.items()},
            "long_run": [ratio, low, high],
            "agrees": agrees,
        }


def figures(rows: list[dict[str, Any]]) -> dict[str, Figure]:
    """The table."""
    found: dict[str, Figure] = {}
    for row in rows:
        name = f"{row['script']}: {row['verdict']}"
        claim = row.get("claim")
        found[name] = one(claim[0] if claim else None, 1, ci95=claim[1:] if claim else None)
        if "long_run" in row:
            found[f"{row['script']}: long run"] = one(row["long_run"][0], ROUNDS, ci95=row["long_run"][1:])
    tuned = [row for row in rows if "claim" in row]
    found["tuned unmodified"] = share(len(tuned), len(rows), bar={"min": 1.0})
    if tuned:
        found["directory unchanged"] = share(sum(row["unchanged"] for row in tuned), len(tuned), bar={"min": 1.0})
    held = [row for row in rows if "agrees" in row]
    if held:
        found["claim and long run agree"] = share(
            sum(row["agrees"] for row in held), len(held), bar={"min": AGREEING_BAR}
        )
        found["long run over claim"] = factor([math.log(row["long_run"][0] / row["claim"][0]) for row in held])
    return found


def main() -> None:
    """Measure, and print the table."""
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=[case.name for case in CASES], help="a script; all by default")
    made.add_argument("--budget", default="90s", help="of each tuning")
    made.add_argument("--runs", type=Path, help="keep run directories and logs here")
    options = made.parse_args()
    cases = [case for case in CASES if not options.only or case.name in options.only][: 2 if options.quick else None]
    with tempfile.TemporaryDirectory(prefix="scripts-") as scratch:
        kept = (options.runs or Path(scratch)).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        rows = []
        for script in cases:
            done = kept / f"{script.name}.json"
            if done.exists():  # a benchmark that was cut off goes on
                rows.append(json.loads(done.read_text(encoding="utf-8")))
                continue
            rows.append(Measured(script, options.budget, kept).all())
            done.write_text(json.dumps(rows[-1]), encoding="utf-8")
            print(json.dumps(rows[-1]), flush=True)
    found = figures(rows)
    report("scripts", found, None)
    if options.json:
        from figures import write

        write("scripts", found, options.json, details={"rows": rows})


if __name__ == "__main__":
    main()
