"""The recipe, a JSON file: the configuration to use, the evidence, where it was measured. Format 1, the first.

Of a folder of recipes of one training the one for this machine is chosen.
"""

from __future__ import annotations

import codecs
import contextlib
import html
import os
import re
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import ValidationError

from autotune.data.errors import MachineMismatchError, RecipeError
from autotune.data.facts import KnownWorkload, Machine, ScriptFacts, Site
from autotune.data.figures import Interval
from autotune.data.files import read_whole, write_atomically
from autotune.data.models import first_mistake
from autotune.data.printable import LONGEST_MESSAGE, one_line
from autotune.data.run_directory import follow_latest
from autotune.machine.fingerprint import Kind, describe_changes, find_nearest, fingerprint, kind_differences, kind_of
from autotune.recipe import apply
from autotune.recipe.answer import Answer, answer_of
from autotune.recipe.compiled import load_compiled
from autotune.recipe.evidence import SCHEMA_VERSION, BestConfiguration, LearningRateRule
from autotune.recipe.training_code import TrainingCode
from autotune.space.configuration import Configuration, DatasetConfig, format_value
from autotune.space.keras_in_use import use_keras
from autotune.space.variables import loading_from
from autotune.stats.deciding import Verdict

_EDITS = ("graph_step", "batched_map", "cache", "num_parallel_calls")  # knobs that act in the code of a script
LARGEST_FILE_BYTES = 1 << 20  # a recipe has some 10 kB
MOST_FILES = 1000  # of a folder
_GIVE = "Give a recipe.json, a run directory, or a folder that has the recipe.json files of one training."
_FIRST_AXIS = re.compile(r"shape=\((None|\d+)")  # of a tensor of the batch: the batch size, where it is fixed
_Key = tuple[str, str, str, int]


class MachineMismatchWarning(UserWarning):
    """The recipe was measured on a machine that differs from this one in what can change speed."""


class Recipe(TrainingCode):
    """The fastest stable configuration of a training on a machine, with the evidence for it.

    Example:
        >>> recipe = Recipe.load("recipe.json").apply()
        >>> recipe.compile(model, optimizer="adam", loss="mse")
        >>> recipe.fit(model, dataset, epochs=90)
    """

    _folder: ClassVar[Path | None] = None  # the folder of its file, where one was read; no part of the recipe

    @classmethod
    def load(cls, path: str | Path, *, strict: bool = False) -> Recipe:
        """Read a recipe; of a folder of recipes, the one that was measured on this kind of machine.

        Where a folder has none for this kind of machine, it warns, and returns a recipe whose configuration is the
        baseline. Of another machine's single recipe `apply` warns.

        Args:
            path: A recipe.json, a run directory, or a folder of recipes of one training.
            strict: Raise an error where none was measured on this kind of machine.

        Raises:
            RecipeError: A file is missing, damaged, or written by a newer version; or the recipes are of unlike
                trainings.
            MachineMismatchError: With `strict`.
        """
        from autotune.recipe.guard import say

        source = read_recipes(path)
        if not source.is_folder and not strict:
            return source.files[0].recipe
        selection = select_recipe(source, strict=strict)
        for text in (*source.notes, *([selection.text] if selection.fits and selection.text else [])):
            say(text)
        if not selection.fits:
            warnings.warn(selection.text, MachineMismatchWarning, stacklevel=2)
        return selection.recipe

    @classmethod
    def parse(cls, text: str | bytes, *, source: str) -> Self:
        """Read a recipe from JSON text.

        Args:
            text: The JSON.
            source: Where it comes from, for messages.

        Raises:
            RecipeError: It is damaged, or written by a newer version.
        """
        content = text.encode(errors="backslashreplace") if isinstance(text, str) else text
        try:
            recipe = cls.model_validate_json(content.removeprefix(codecs.BOM_UTF8))
        except ValidationError as error:
            mistake = first_mistake(error)
            if mistake.startswith("schema_version:"):
                problem = f"{source}: this autotune reads recipes of schema_version {SCHEMA_VERSION} only"
                raise RecipeError(problem, hint="Install the autotune that wrote it, or a later one.") from error
            raise RecipeError(f"{source}: not a recipe: {mistake}") from error
        if "schema_version" not in recipe.model_fields_set:
            raise RecipeError(f"{source}: not a recipe: schema_version is missing")
        return recipe

    def to_json(self) -> str:
        """Return the text of the file."""
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the recipe to a file, whole or not at all.

        Raises:
            RunDirectoryError: The place cannot be written.
        """
        write_atomically(Path(path), self.to_json())

    def apply(self) -> Self:
        """Set threads, precision and the like, and return the recipe. Call it before TensorFlow makes anything.

        It does what the trial processes did, and turns on memory growth on every GPU, as they did. The kernels that
        XLA chose for the claim are loaded, where the run has kept them beside the recipe. It gives a
        `MachineMismatchWarning` where the recipe changes something, and this machine differs from that of the recipe,
        and a warning that names edits of the script's code, which are not made.

        Raises:
            ApplyError: Too late: TensorFlow's runtime has started, or a knob cannot act any more.
        """
        use_keras(self.workload.keras)
        if self.changes:
            here = fingerprint()
            if unlike := kind_differences(self.machine, here):
                text = f"the recipe was measured on another machine: {'; '.join(unlike)}"
                warnings.warn(one_line(text, longest=LONGEST_MESSAGE), MachineMismatchWarning, stacklevel=2)
            elif changes := self.machine.differences(here):
                text = describe_changes(changes, "autotune verify RECIPE SCRIPT")
                warnings.warn(text, MachineMismatchWarning, stacklevel=2)
            if (folder := load_compiled(self, self._folder, here)) is not None:
                os.environ.update(loading_from(str(folder), os.environ))
                self.__dict__["_loads_compiled"] = True
        script = self.workload.script
        if edits := [name for name in _EDITS if name in self.changes and script and script.sites.get(name)]:
            lost = ", ".join(self.describe_change(name) for name in edits)
            text = f"recipe.apply() does not edit your code. Until you do, these are not applied: {lost}"
            warnings.warn(f"{text}. `autotune show RECIPE --diff SCRIPT` prints the edit", stacklevel=2)
        apply.apply_in_training(self.configuration)
        return self

    def describe_change(self, knob: str) -> str:
        """Return a changed knob with its value, and what it gave by itself where that was measured."""
        gains = [f"×{known.gain.value:.2f}" for known in self.evidence.contributions if known.knob == knob]
        gave = f"gave {gains[0]}" if gains else "its part of the gain was not measured"
        return f"{knob}={format_value(self.configuration[knob])} ({gave})"

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the scope to build and compile the model in; it does nothing for a recipe without a strategy.

        Raises:
            ApplyError: This machine has fewer devices than replicas, or `apply()` was not called.
        """
        apply.refuse_overridden(self.configuration)
        scope: contextlib.AbstractContextManager[Any] = apply.strategy_of(self.configuration).scope()
        return scope

    @property
    def dataset_config(self) -> DatasetConfig:
        """The config passed to the workload's `dataset(config)` in the trials."""
        return DatasetConfig.of(Configuration(self.configuration))

    @property
    def batch_size(self) -> int:
        """Examples per step."""
        return Configuration(self.configuration).batch_size

    def __repr__(self) -> str:
        """Return the finding, its changes, the limit of the baseline, and the machine."""
        answer, changes = self.answer, Configuration(self.configuration).describe(Configuration(self.baseline))
        lines = [f"Recipe of {self.workload.name}: {answer.headline}", f"  {changes}"]
        lines += [f"  {': '.join((choice.kind.capitalize(), '; '.join(choice.said)))}" for choice in answer.choices]
        lines += [f"  {answer.diagnosis}"] if answer.diagnosis else []
        lines.append(f"  measured on {self.machine.describe()}, run {self.created_by.run}")
        return "\n".join(map(one_line, lines))

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the recipe as notebooks show it."""
        answer = self.answer
        said = [(choice.kind.capitalize(), "; ".join(choice.said)) for choice in answer.choices]
        rows = [(change.knob, change.baseline, change.recommended) for change in answer.changes]
        tables = ""
        for table in (said, [("knob", "baseline", "recommended"), *rows] if rows else []):
            lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table]
            tables += f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if lines else ""
        headline, diagnosis = html.escape(answer.headline), html.escape(answer.diagnosis)
        return f"<b>{html.escape(self.workload.name)}: {headline}</b><p>{diagnosis}</p>{tables}"

    def with_candidate(self) -> Self:
        """Return the recipe of the best candidate of an undecided run, which no confirmation has shown to be faster.

        Raises:
            RecipeError: The run was decided, or no candidate looked faster.
        """
        candidate, evidence = self.candidate, self.evidence
        longer = "Tune for longer: autotune tune … --resume RUN."
        if evidence.verdict is not Verdict.UNDECIDED:
            verdict = evidence.verdict.value.replace("_", " ")
            raise RecipeError(f"no candidate waits for confirmation: the recipe's run ended with {verdict!r}")
        if candidate is None:
            raise RecipeError("no candidate of the recipe's run looked surely faster", hint=longer)
        if not candidate.may_be_faster:
            problem = f"the best candidate is no faster than the baseline, or unstable: {candidate.reason}"
            raise RecipeError(problem, hint=longer)
        faster, rate = candidate.speedup, evidence.baseline_throughput.value
        ratio = Configuration(candidate.configuration).update_size / Configuration(self.baseline).update_size
        return self._with(
            BestConfiguration(
                configuration=candidate.configuration,
                speedup=faster,
                throughput=Interval(value=rate * faster.value, low=rate * faster.low, high=rate * faster.high),
                confirmed=False,
                learning_rate_rule=None if ratio == 1.0 else LearningRateRule(batch_ratio=ratio),
            )
        )

    def with_baseline(self) -> Self:
        """Return the recipe of the baseline: it trains as the workload does by itself."""
        return self._with(None)

    def with_same_training(self) -> Self:
        """Return the recipe of the fastest configuration of the same batches; perhaps the baseline.

        Raises:
            RecipeError: The run looked for something else, whatever the batch size.
        """
        sizes = (Configuration(self.configuration).update_size, Configuration(self.baseline).update_size)
        if self.evidence.objective != "time_to_loss" and sizes[0] != sizes[1]:
            problem = f"the recipe's run looked for {self.evidence.objective} at any batch size"
            raise RecipeError(problem, hint="Tune without --objective, or with --fixed-batch.")
        return self if self.evidence.objective != "time_to_loss" else self._with(self.same_training)

    def with_larger_batch(self) -> Self:
        """Return the recipe of the best configuration with another batch size, recommended or not.

        Raises:
            RecipeError: None was tried.
        """
        if self.larger_batch is None:
            hint = "Tune without --fixed-batch, with a search space that has several batch sizes."
            raise RecipeError("the recipe's run tried no other batch size", hint=hint)
        return self._with(self.larger_batch)

    def _with(self, answer: BestConfiguration | None) -> Self:
        """Return the recipe of an answer, or of the baseline."""
        if answer is None:
            alike = Interval(value=1.0, low=1.0, high=1.0)
            rate = self.evidence.baseline_throughput
            answer = BestConfiguration(configuration=self.baseline, speedup=alike, throughput=rate, confirmed=True)
        evidence = {"throughput": answer.throughput, "speedup": answer.speedup}
        return self.model_copy(
            update={
                "configuration": answer.configuration,
                "learning_rate_rule": answer.learning_rate_rule,
                "evidence": self.evidence.model_copy(update=evidence),
            }
        )

    @property
    def answer(self) -> Answer:
        """The answer of the run, for everything that shows it; without its commands, see `answer_at`."""
        return answer_of(self)


# ------------------------------------------------------------------------------------- choosing a recipe


class RecipeFile(NamedTuple):
    """A recipe and its file."""

    path: Path
    recipe: Recipe


class RecipeSource(NamedTuple):
    """The recipes at a path: those of a folder, each of another kind of machine, or the one of a file or a run."""

    path: Path
    files: tuple[RecipeFile, ...]
    is_folder: bool = False
    notes: tuple[str, ...] = ()  # on files of the folder that do not count

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes alone."""
        return tuple(file.recipe for file in self.files)


class Selection(NamedTuple):
    """The recipe that was chosen for this machine."""

    path: Path
    recipe: Recipe
    fits: bool  # it was measured on this kind of machine
    takes_baseline: bool = False  # the training goes on as the script has it
    text: str = ""  # which recipe and why; empty where nothing is to be said


def read_recipes(path: str | Path) -> RecipeSource:
    """Read a recipe, the recipe of a run directory, or the `*.json` files that are directly in a folder of recipes.

    Of the recipes of one kind of machine the newest counts, an undecided one only where no other is decided.

    Raises:
        RecipeError: There is no recipe; a file is no recipe; or the recipes are of unlike trainings.
    """
    path = follow_latest(Path(path))
    if not os.path.isdir(path):
        return RecipeSource(path, (RecipeFile(path, _read_recipe(path)),))
    if os.path.lexists(path / "run.json"):
        file = path / "recipe.json"
        if not os.path.lexists(file):
            hint = f"Continue it: autotune tune … --resume {path}"
            raise RecipeError(f"{path} is a run without a recipe: it has not ended", hint=hint)
        return RecipeSource(path, (RecipeFile(file, _read_recipe(file)),))
    named = (file for file in path.glob("*.json") if not file.name.startswith("."))
    paths = sorted(islice(named, MOST_FILES + 1))
    if not paths:
        raise RecipeError(f"{path} is neither a run nor a folder of recipes: it has no .json file", hint=_GIVE)
    if len(paths) > MOST_FILES:
        raise RecipeError(f"{path} has more than {MOST_FILES} .json files")
    found = []
    for file in paths:
        try:
            found.append(RecipeFile(file, _read_recipe(file)))
        except RecipeError as error:
            raise RecipeError(error.message, hint=f"Move it out of {path}, or mend it.") from error
    files, notes = _drop_older(found)
    return RecipeSource(path, files, is_folder=True, notes=notes)


def select_recipe(source: RecipeSource, *, strict: bool = False) -> Selection:
    """Choose the recipe that a training takes on this machine.

    Where none was measured on this kind of machine, a folder gives the recipe of the baseline, and a file its own.

    Raises:
        MachineMismatchError: None was, and `strict` is set.
    """
    here = fingerprint()
    selection = select_nearest(source, here)
    if selection.fits:
        return selection
    if source.is_folder:
        known = "; ".join(one_line(kind_of(recipe.machine), longest=100) for recipe in source.recipes)
        mismatch = f"{source.path} has no recipe for {kind_of(here)}. It has recipes for {known}"
        then = "Training as the script has it"
    else:
        differences = "; ".join(kind_differences(selection.recipe.machine, here))
        mismatch = f"the recipe was measured on another machine: {differences}"
        then = "Training with it all the same"
    mismatch = one_line(mismatch, longest=LONGEST_MESSAGE // 2)
    command = f"autotune tune … --begin-with {source.path}"
    if strict:
        raise MachineMismatchError(mismatch, hint=f"Tune here: {command}")
    text = f"{mismatch}. {then}. To tune here, beginning with what is known: {command}"
    recipe = selection.recipe.with_baseline() if source.is_folder else selection.recipe
    return selection._replace(recipe=recipe, takes_baseline=source.is_folder, text=text)


def select_nearest(source: RecipeSource, here: Machine | None = None) -> Selection:
    """Choose the recipe whose machine is the nearest to this one."""
    here = here or fingerprint()
    path, recipe = source.files[find_nearest([recipe.machine for recipe in source.recipes], here)[0]]
    fits = not kind_differences(recipe.machine, here)
    kind = f"was measured on this kind of machine: {kind_of(recipe.machine)}"
    text = f"{path} {kind if fits else 'is the nearest to this machine'}" if source.is_folder else ""
    return Selection(path, recipe, fits, text=one_line(text, longest=LONGEST_MESSAGE))


def find_recipe(path: Path, say: Callable[[str], object], *, strict: bool = False, nearest: bool = False) -> Selection:
    """Choose among the recipes at a path as `select_recipe` does, or the `nearest`; say which and why."""
    source = read_recipes(path)
    selection = select_nearest(source) if nearest else select_recipe(source, strict=strict)
    for text in filter(None, (*source.notes, selection.text)):
        say(text)
    return selection


def holds_recipes(path: Path) -> bool:
    """Return whether a path is a recipe file, or a folder of recipes: it has no run at any depth."""
    if not os.path.isdir(path):
        return os.path.isfile(path)  # Path.is_file raises on a name that is too long
    is_run = os.path.lexists(path / "run.json")
    return not is_run and any(path.glob("*.json")) and not any(path.rglob("run.json"))


def _read_recipe(path: Path) -> Recipe:
    """Read the recipe of a file. Raises `RecipeError`."""
    recipe = Recipe.parse(read_whole(path, LARGEST_FILE_BYTES, RecipeError, _GIVE), source=str(path))
    recipe.__dict__["_folder"] = path.parent
    return recipe


def _drop_older(found: list[RecipeFile]) -> tuple[tuple[RecipeFile, ...], tuple[str, ...]]:
    """Return a file for each kind of machine, and notes on the others. Raises `RecipeError` for unlike trainings."""
    newest: dict[Kind, RecipeFile] = {}
    notes = []
    for file in found:
        if file is not found[0] and (difference := first_difference(found[0].recipe.workload, file.recipe.workload)):
            raise RecipeError(
                one_line(f"{found[0].path} and {file.path} are of unlike trainings: {difference}"),
                hint="Keep the recipes of each training in a folder of their own.",
            )
        kind = kind_of(file.recipe.machine)
        older, newest[kind] = sorted((newest.get(kind, file), file), key=_rank)
        if older.recipe != newest[kind].recipe:
            why = "an answer" if _rank(older)[0] < _rank(newest[kind])[0] else "a newer recipe"
            notes.append(one_line(f"{older.path} is left out: {newest[kind].path} has {why} for {kind}"))
    return tuple(newest.values()), tuple(notes)


def _rank(file: RecipeFile) -> tuple[bool, str]:
    """Return by what the recipes of one kind of machine are ordered: an answer before none, then the newer one."""
    return file.recipe.evidence.verdict is not Verdict.UNDECIDED, file.recipe.created_by.created_at


# --------------------------------------------------------------------------------------------------- the same training


def first_difference(workload: KnownWorkload, other: KnownWorkload) -> str:
    """Return the first difference of two trainings in half a sentence; empty where they are the same.

    They differ where the baseline of one has not started.
    """
    if workload.keras is not other.keras:
        return f"one trains with {workload.keras.label}, the other with {other.keras.label}"
    if workload.script is not None and other.script is not None:
        if workload.script.trains is not other.script.trains:
            return f"one trains by {workload.script.trains}, the other by {other.script.trains}"
        calls = _calls(workload.script, f"{workload.name}.py")
        others = _calls(other.script, f"{other.name}.py")
        for call, site in {**calls, **others}.items():
            if call not in calls or call not in others:
                return f"{site} leads to the training of one only"
        if list(calls) != list(others):
            return "their pipelines make the same calls in another order"
    elif (workload.script is None) != (other.script is None):
        return "one was tuned as a script, the other as a Workload"
    else:
        if workload.name != other.name:
            return f"one is {workload.name}, the other {other.name}"
        if (workload.batched, workload.takes_config) != (other.batched, other.takes_config):
            return "their dataset() batches or takes a config in one only"
    if workload.parameters is None or other.parameters is None or workload.element is None or other.element is None:
        return "the baseline of one was never started, so its model and data are unknown"
    if workload.parameters != other.parameters:
        return f"their models have {workload.parameters:,} and {other.parameters:,} weights"
    elements = [_FIRST_AXIS.sub("shape=(batch", known.element or "") for known in (workload, other)]
    if elements[0] != elements[1] or workload.batch_ranks != other.batch_ranks:
        return f"their batches are {elements[0]} and {elements[1]}"
    if workload.drop_remainder != other.drop_remainder:
        return "one of them drops a smaller last batch"
    return ""


def _calls(script: ScriptFacts, own_file: str) -> dict[tuple[str, _Key], Site]:
    """Return the calls that lead to the training, by what they do and where; the script's own file has no name."""
    sites = {name: (getattr(script, name),) for name in ("fit_site", "compile_site", "step_function")}
    return {
        (name, ("" if site.file == own_file else site.key[0], *site.key[1:])): site
        for name, found in [*sites.items(), *sorted(script.sites.items())]
        for site in found
        if site is not None and name not in ("cache", "batched_map")  # not all runs know these
    }
