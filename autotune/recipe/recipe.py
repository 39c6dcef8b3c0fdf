"""The recipe, a JSON file: the configuration to use, the evidence, where it was measured. Format 1, the first."""

from __future__ import annotations

import codecs
import html
import itertools
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import Field, ValidationError, model_validator

from autotune.data.credentials import masked_names
from autotune.data.errors import ApplyError, ArgumentError, MachineMismatchError, RecipeError
from autotune.data.facts import KnownWorkload, Machine, Trains
from autotune.data.figures import Interval
from autotune.data.files import read_at_most, write_atomically
from autotune.data.models import Amount, Count, KnobValue, Many, first_mistake
from autotune.data.printable import LONGEST_MESSAGE, one_line
from autotune.machine.fingerprint import fingerprint
from autotune.machine.kind import find_nearest, kind_differences, kind_of
from autotune.recipe import apply
from autotune.recipe.answers import Answer, LearningRateRule, describe_answers
from autotune.recipe.apply import TrainingPipeline
from autotune.recipe.evidence import BestCandidate, Evidence, Knobs, Part
from autotune.recipe.keras_api import refuse_other_keras
from autotune.recipe.same_workload import first_difference
from autotune.recipe.selection import OnMismatch, Selection, describe_changes
from autotune.recipe.tf_private import keras, tf
from autotune.recipe.training_data import make_pipeline
from autotune.space.configuration import Configuration, DatasetConfig, format_value
from autotune.space.keras_in_use import use_keras
from autotune.stats.deciding import Verdict

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")
LARGEST_FILE_BYTES = 4 << 20  # of a book; a recipe has some 10 kB
MOST_RECIPES = 100  # of a book
_DAMAGED = "The file is damaged, or was not written by `autotune tune`."
_DAMAGED_BOOK = "Merge the recipes again: autotune merge RECIPE… -o BOOK"


class MachineMismatchWarning(UserWarning):
    """The recipe was measured on a machine that differs from this one in what can change speed."""


class RecipeWorkload(KnownWorkload, Part):
    """The workload that was trained."""

    args: Many[str] = Field((), description="`sys.argv[1:]` of its file.")
    train_samples: Count | None = Field(None, description="Of the long training; null when not known.")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The stored arguments of its file. Raises ArgumentError where one of them is masked."""
        if masked_names(self.args):
            raise ArgumentError(
                "the recipe stores no credentials, but its script got some",
                hint=f"Give the script's arguments again: -- {shlex.join(self.args)}",
            )
        return self.args


class CreatedBy(Part):
    """Provenance: which run of which version, when, with what limits."""

    autotune: str
    run: str
    created_at: str
    search_space: str
    trials: Count
    seed: int
    budget_seconds: Amount
    spent_seconds: Amount
    started_from: Many[str] = Field((), description="Earlier runs and recipes whose configurations were tried first.")


class _File(Part):
    """What a recipe and a book have in common."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION

    def to_json(self) -> str:
        """Return the text of the file."""
        return self.model_dump_json(indent=2) + "\n"


class Recipe(_File):
    """The fastest stable configuration of a training on a machine, with the evidence for it.

    Example:
        >>> recipe = Recipe.load("recipe.json")
        >>> recipe.apply()
        >>> model.compile("adam", "mse", **recipe.compile_args())
        >>> model.fit(**recipe.fit_args(dataset), epochs=90)
    """

    configuration: Knobs
    baseline: Knobs
    evidence: Evidence
    candidate: BestCandidate | None = Field(None, description="What came closest, when nothing is recommended.")
    learning_rate_rule: LearningRateRule | None = Field(description="Null where nothing about learning changes.")
    same_training: Answer | None = Field(None, description="The fastest at the script's own batch size, if confirmed.")
    larger_batch: Answer | None = Field(
        None, description="The best with another batch size; null where none was tried."
    )
    machine: Machine
    workload: RecipeWorkload
    created_by: CreatedBy

    @model_validator(mode="after")
    def _same_knobs_everywhere(self) -> Self:
        sides = {"configuration": self.configuration, "baseline": self.baseline}
        for (has, knobs), (lacks, others) in itertools.permutations(sides.items()):
            if missing := ", ".join(name for name in knobs if name not in others):
                raise ValueError(f"{lacks} has no {missing}, and {has} has")
        return self

    @classmethod
    def load(cls, path: str | Path, *, on_mismatch: OnMismatch | None = None) -> Recipe:
        """Read a recipe; of a book, the one that was measured on this kind of machine.

        Args:
            path: A recipe, or a book of recipes.
            on_mismatch: What to do where none was measured on this kind of machine. `error`: raise. `nearest`: warn,
                and return the nearest. `baseline`: warn, and return one whose configuration is the baseline. `ignore`:
                return the nearest. When left out, a book has `baseline`, and a recipe is returned as it is.

        Raises:
            ArgumentError: `on_mismatch` is none of the four.
            RecipeError: The file is missing, damaged, or written by a newer version.
            MachineMismatchError: With `on_mismatch="error"`.
        """
        loaded = load_recipes(path)
        if isinstance(loaded, Recipe) and on_mismatch is None:
            return loaded
        recipe, selection = choose_recipe(loaded, on_mismatch, source=str(path))
        if selection.text and not selection.fits and on_mismatch != "ignore":
            warnings.warn(selection.text, MachineMismatchWarning, stacklevel=2)
        elif selection.text:
            from autotune.recipe.guard import say

            say(selection.text)
        return recipe

    @classmethod
    def parse(cls, text: str | bytes, *, source: str) -> Self:
        """Read a recipe from JSON text.

        Args:
            text: The JSON.
            source: Where it comes from, for messages.

        Raises:
            RecipeError: It is damaged, or written by a newer version.
        """
        return _parse(cls, text, source=source, noun="recipe", hint=_DAMAGED)

    def save(self, path: str | Path) -> None:
        """Write the recipe to a file, whole or not at all.

        Raises:
            RunDirectoryError: The place cannot be written.
        """
        write_atomically(Path(path), self.to_json())

    def apply(self, *, on_mismatch: Literal["nearest", "error", "ignore"] = "nearest") -> None:
        """Set threads, precision and the like. Call it before the first tensor, dataset or model is made.

        It does what the trial processes did, and turns on memory growth on every GPU, as they did.

        Args:
            on_mismatch: What to do where the recipe changes something, and was measured on another kind of machine.
                `nearest`: warn. `error`: raise. `ignore`: nothing.

        Raises:
            ApplyError: Too late: TensorFlow's runtime has started, or a knob cannot act any more.
            ArgumentError: `on_mismatch` is none of the three.
            MachineMismatchError: With `on_mismatch="error"`.
        """
        _check_wish(on_mismatch, ("nearest", "error", "ignore"))
        use_keras(self.workload.keras)
        if self.changes and on_mismatch != "ignore":
            _, selection = choose_recipe(self, on_mismatch, source="RECIPE")
            changes = self.machine.differences(fingerprint()) if selection.fits else ()
            text = describe_changes(changes, "autotune verify RECIPE SCRIPT") if changes else selection.text
            if text:
                warnings.warn(f"{text} (on_mismatch='ignore' ends this warning)", MachineMismatchWarning, stacklevel=2)
        apply.apply_in_training(self.configuration)

    def guard(self, *, log: str | Path | None = None) -> Any:
        """Return a Keras callback that compares the throughput with the claim, and warns once where it is slow.

        Args:
            log: A file that takes a line of JSON every ten seconds; None for none.
        """
        from autotune.recipe.guard import Guard, guard_callback

        use_keras(self.workload.keras)
        guard = Guard(self.evidence, self.machine, log=None if log is None else Path(log))
        return guard_callback(guard, self.batch_size)

    def compile_args(self, optimizer: str | keras.Optimizer | None = None) -> dict[str, Any]:
        """Return keyword arguments for `model.compile`: `jit_compile` and `steps_per_execution`.

        Args:
            optimizer: Required by a recipe of `--global-batch`: it is set to accumulate gradients, and is added to the
                arguments.

        Raises:
            ApplyError: Something that `apply()` set has changed since, such as the dtype policy. Or the optimizer is
                missing, was built before, or is of another Keras than the recipe.
        """
        use_keras(self.workload.keras)
        apply.refuse_overridden(self.configuration)
        arguments: dict[str, Any] = apply.compile_arguments(self.configuration)
        if optimizer is not None:
            if not isinstance(optimizer, str):
                refuse_other_keras(optimizer, self.workload.keras)
            arguments["optimizer"] = keras.optimizers.get(optimizer)
            apply.accumulate(arguments["optimizer"], self.configuration)
        elif Configuration(self.configuration).update_size > self.batch_size:
            raise ApplyError(
                f"the recipe accumulates the gradients of {self.configuration['global_batch']} examples",
                hint="Give it the optimizer: model.compile(loss=…, **recipe.compile_args(optimizer)).",
            )
        return arguments

    def strategy(self) -> tf.distribute.Strategy:
        """Return the `tf.distribute` strategy of the trials: build and compile the model in its `scope()`.

        For a recipe without one this is TensorFlow's default, whose scope does nothing. Call it after `apply()`.

        Raises:
            ApplyError: This machine has fewer devices than replicas. Or as `compile_args`.
        """
        apply.refuse_overridden(self.configuration)
        strategy: tf.distribute.Strategy = apply.strategy_of(self.configuration)
        return strategy

    @property
    def dataset_config(self) -> DatasetConfig:
        """The config passed to the workload's `dataset(config)` in the trials."""
        return DatasetConfig.of(Configuration(self.configuration))

    @property
    def batch_size(self) -> int:
        """Examples per step."""
        return Configuration(self.configuration).batch_size

    def batch(self, dataset: tf.data.Dataset, *, drop_remainder: bool | None = None) -> tf.data.Dataset:
        """Batch and prefetch a dataset of single examples as in the trials.

        Give batches of `dataset_config.batch_size` where the workload does its own batching (`batched=True`). The
        recipe of a script takes either. The batches never repeat, so validation data ends; `fit_args` prepares training
        data.

        Args:
            dataset: Single examples, or batches with `batched=True`. Arrays are examples.
            drop_remainder: Whether a smaller last batch is dropped; as in the workload when None.

        Returns:
            A dataset of batches. It ends where `dataset` ends.

        Raises:
            ApplyError: The dataset is batched and the workload's was not, or the other way round. Or as `compile_args`.
        """
        ending = Configuration(self.configuration).replace(persistent_iterator=False)
        return self._pipeline(dataset, ending, drop_remainder).dataset

    def fit_args(
        self, dataset: tf.data.Dataset, *, drop_remainder: bool | None = None, steps_per_execution: int | None = None
    ) -> dict[str, Any]:
        """Return keyword arguments of `model.fit` for the training data: `x`, and `steps_per_epoch` where needed.

        With the knob `persistent_iterator`, `x` repeats endlessly and `steps_per_epoch` ends each epoch. Without it,
        and for datasets of unknown or infinite cardinality, `x` is `batch(dataset)` and the only argument. Use `batch`
        if you give `fit` a `steps_per_epoch` of your own.

        Args:
            dataset: Single examples, or batches with `batched=True`. Arrays are examples; with the recipe of a script
                they are shuffled in each epoch, as `fit` does.
            drop_remainder: Whether a smaller last batch is dropped; as in the workload when None.
            steps_per_execution: What the model is compiled with; as in `compile_args()` when None.

        Raises:
            ApplyError: `steps_per_execution` does not divide the steps of an epoch, so an epoch would run past its
                end. Or the dataset is batched and the workload's was not, or the other way round. Or as `compile_args`.
        """
        configuration = Configuration(self.configuration)
        if steps_per_execution is not None:
            configuration = configuration.replace(steps_per_execution=steps_per_execution)
        training = self._pipeline(dataset, configuration, drop_remainder, shuffle=True)
        compiled, divides = configuration["steps_per_execution"], training.in_force["steps_per_execution"]
        if compiled != divides:
            raise ApplyError(
                f"steps_per_execution={compiled} does not divide the {training.steps_per_epoch} steps of an epoch",
                hint=f'Call model.compile(..., **recipe.compile_args() | {{"steps_per_execution": {divides}}}) and '
                f"recipe.fit_args(dataset, steps_per_execution={divides}).",
            )
        return training.fit_args

    def _pipeline(
        self, dataset: Any, configuration: Configuration, drop_remainder: bool | None, *, shuffle: bool = False
    ) -> TrainingPipeline:
        apply.refuse_overridden(self.configuration)
        return make_pipeline(dataset, configuration, self.workload, drop_remainder=drop_remainder, shuffle=shuffle)

    def __repr__(self) -> str:
        """Return three lines: what was found, what it changes, and where it was measured."""
        changes = Configuration(self.configuration).describe(Configuration(self.baseline))
        verdict, speedup = self.evidence.verdict.value.replace("_", " "), self.evidence.speedup.shown()
        return (
            f"Recipe of {one_line(self.workload.name)}: {verdict}, {speedup}\n  {changes}\n"
            f"  measured on {one_line(self.machine.describe())}, run {one_line(self.created_by.run)}"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the recipe as notebooks show it."""
        rows = ""
        for name, value in self.changes.items():
            cells = (name, format_value(self.baseline[name]), format_value(value))
            rows += f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        rule, gain = self.learning_rate_rule, self.evidence.speedup.shown() if rows else "the baseline"
        if rule is not None and rule.same_loss is not None:
            gain = f"{rule.same_loss.speedup.shown()} sooner to the same losses"
        verdict = self.evidence.verdict.value.replace("_", " ")
        answers = "".join(
            f"<tr><th>{html.escape(heading)}</th><td>{html.escape(text)}</td></tr>" for heading, text in self.answers
        )
        return (
            f"<b>{html.escape(self.workload.name)}: {verdict}, {gain}</b>"
            + (f'<table style="white-space: pre-wrap; text-align: left">{answers}</table>' if answers else "")
            + (f"<table><tr><th>knob</th><th>baseline</th><th>recommended</th></tr>{rows}</table>" if rows else "")
        )

    def with_candidate(self) -> Self:
        """Return the recipe of the best candidate of an undecided run, which no confirmation has shown to be faster.

        Raises:
            RecipeError: The run was decided, or measured no candidate.
        """
        candidate, evidence = self.candidate, self.evidence
        longer = "Tune for longer: autotune tune … --resume RUN."
        if evidence.verdict is not Verdict.UNDECIDED:
            verdict = evidence.verdict.value.replace("_", " ")
            problem = f"no candidate waits for confirmation: the recipe's run ended with {verdict!r}"
            raise RecipeError(problem, hint="Run the recipe without --candidate.")
        if candidate is None:
            raise RecipeError("the recipe's run measured no candidate", hint=longer)
        if not candidate.may_be_faster:
            problem = f"the best candidate is no faster than the baseline, or unstable: {candidate.reason}"
            raise RecipeError(problem, hint=longer)
        faster, rate = candidate.estimate, evidence.baseline_throughput.value
        ratio = Configuration(candidate.configuration).update_size / Configuration(self.baseline).update_size
        return self._with(
            Answer(
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
        """Return the recipe of the fastest configuration that changes nothing about learning; perhaps the baseline.

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

    def _with(self, answer: Answer | None) -> Self:
        """Return the recipe of an answer, or of the baseline."""
        if answer is None:
            alike = Interval(value=1.0, low=1.0, high=1.0)
            rate = self.evidence.baseline_throughput
            answer = Answer(configuration=self.baseline, speedup=alike, throughput=rate, confirmed=True)
        evidence = {"throughput": answer.throughput, "speedup": answer.speedup}
        return self.model_copy(
            update={
                "configuration": answer.configuration,
                "learning_rate_rule": answer.learning_rate_rule,
                "evidence": self.evidence.model_copy(update=evidence),
            }
        )

    def learning_rate(self, rate: float) -> float:
        """Return the learning rate to train with, for the one that was tuned with: by the rule that was tested.

        Example:
            >>> optimizer = keras.optimizers.Adam(recipe.learning_rate(1e-3))
        """
        return rate if self.learning_rate_rule is None else rate * self.learning_rate_rule.factor

    @property
    def changes(self) -> Mapping[str, KnobValue]:
        """The knobs in which the configuration differs from the baseline."""
        return Configuration(self.configuration).differences(Configuration(self.baseline))

    @property
    def unit(self) -> str:
        """The unit of speeds: `samples`, or `updates` of a loop whose work per update varies."""
        return "samples" if self.workload.script is None else self.workload.script.unit

    @property
    def answers(self) -> list[tuple[str, str]]:
        """Both answers and the recommendation as headings and text; empty where no other batch size is known."""
        script = self.workload.script
        is_loop = script is not None and script.trains is Trains.LOOP  # its losses are those of its own steps
        return describe_answers(
            self.same_training,
            self.larger_batch,
            closest=self.candidate,
            baseline=Configuration(self.baseline),
            recommended=Configuration(self.configuration),
            unit=self.unit,
            losses="training losses" if is_loop else "losses",
        )


class Book(_File):
    """Recipes of one training, each of another kind of machine."""

    recipes: Many[Recipe] = Field(min_length=1, max_length=MOST_RECIPES)

    @model_validator(mode="after")
    def _one_training_one_recipe_per_kind(self) -> Self:
        known: dict[object, int] = {}
        for number, recipe in enumerate(self.recipes, start=1):
            difference = "" if number == 1 else first_difference(self.recipes[0].workload, recipe.workload)
            if difference:
                raise ValueError(f"recipes 1 and {number} are of unlike trainings: {difference}")
            kind = kind_of(recipe.machine)
            if kind in known:
                raise ValueError(f"recipes {known[kind]} and {number} are both of {kind}")
            known[kind] = number
        return self


def load_recipes(path: str | Path) -> Recipe | Book:
    """Read a recipe or a book of recipes.

    Raises:
        RecipeError: The file is missing, damaged, or written by a newer version.
    """
    hint = "Give the path of a recipe.json, as printed by `autotune tune`."
    try:
        text = read_at_most(Path(path), LARGEST_FILE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RecipeError(f"cannot read the recipe {path}: {reason}", hint=hint) from error
    if len(text) > LARGEST_FILE_BYTES:
        raise RecipeError(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, so not a recipe", hint=hint)
    if re.search(rb'"recipes"\s*:', text):  # a key of books only
        return _parse(Book, text, source=str(path), noun="recipe book", hint=_DAMAGED_BOOK)
    return Recipe.parse(text, source=str(path))


def choose_recipe(loaded: Recipe | Book, on_mismatch: OnMismatch | None, *, source: str) -> tuple[Recipe, Selection]:
    """Return the recipe that a training takes on this machine, and why; see `Recipe.load`.

    Raises:
        ArgumentError: `on_mismatch` is none of its words.
        MachineMismatchError: With `on_mismatch="error"`.
    """
    is_book, recipes = (True, loaded.recipes) if isinstance(loaded, Book) else (False, (loaded,))
    wish = ("baseline" if is_book else "nearest") if on_mismatch is None else on_mismatch
    _check_wish(wish, get_args(OnMismatch))
    here = fingerprint()
    index = find_nearest([recipe.machine for recipe in recipes], here)[0]
    recipe, name = recipes[index], f"recipe {index + 1} of {len(recipes)} in {source}"
    differences = "; ".join(kind_differences(recipe.machine, here))
    if not differences or wish == "ignore":
        kind = f"was measured on this kind of machine: {kind_of(recipe.machine)}"
        text = f"{name} {'is the nearest to this machine' if differences else kind}" if is_book else ""
        return recipe, Selection(fits=not differences, text=one_line(text, longest=LONGEST_MESSAGE))
    other = f"no recipe of this kind of machine; nearest is {name}"
    if not is_book:
        other = "the recipe was measured on another machine"
    mismatch = f"{other}: {differences}"
    command = f"autotune tune … --book {source}"
    if wish == "error":
        raise MachineMismatchError(mismatch, hint=f"Tune here: {command}")
    then = "training as the script has it" if wish == "baseline" else "training with it all the same"
    text = f"{mismatch}; {then}. To tune here, beginning with what is known: {command}"
    selection = Selection(fits=False, takes_baseline=wish == "baseline", text=one_line(text, longest=LONGEST_MESSAGE))
    return recipe.with_baseline() if selection.takes_baseline else recipe, selection


def _check_wish(word: object, words: Sequence[str]) -> None:
    """Raise `ArgumentError` where an `on_mismatch` is none of these words."""
    if word not in words:
        *first, last = (repr(known) for known in words)
        raise ArgumentError(f"on_mismatch={word!r}", hint=f"It is {', '.join(first)} or {last}.")


Model = TypeVar("Model", bound=Part)


def _parse(model: type[Model], text: str | bytes, *, source: str, noun: str, hint: str) -> Model:
    """Read a file's model. Raises `RecipeError` with the first mistake."""
    content = text.encode(errors="backslashreplace") if isinstance(text, str) else text
    try:
        read = model.model_validate_json(content.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        where, mistake = first_mistake(error)
        if where == "schema_version":
            problem = f"{source}: this autotune reads {noun}s of schema_version {SCHEMA_VERSION} only"
            raise RecipeError(problem, hint="Install the autotune that wrote it, or a later one.") from error
        problem = f"{where or 'the file'}: {mistake.removeprefix('Value error, ')}"
        raise RecipeError(f"{source}: not a {noun}: {problem}", hint=hint) from error
    versioned: tuple[Part, ...] = (read, *read.recipes) if isinstance(read, Book) else (read,)
    if any("schema_version" not in part.model_fields_set for part in versioned):
        raise RecipeError(f"{source}: not a {noun}: schema_version is missing", hint=hint)
    return read
