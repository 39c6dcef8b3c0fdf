"""The recipe: the configuration to use, the evidence for it, and where it was measured. A JSON file.

Version history of the format: 1, the first. Reading executes nothing and sets nothing: only knobs that exist,
with values they can take, get through.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from autotune.devices.machine import Machine, fingerprint
from autotune.errors import (
    ApplyError,
    ArgumentError,
    ConfigurationError,
    MachineMismatchError,
    RecipeError,
)
from autotune.files import read_at_most, write_atomically
from autotune.mistakes import first_mistake
from autotune.printable import one_line
from autotune.recipe import apply
from autotune.space.configuration import Configuration
from autotune.space.knobs import Device, KnobValue, Value, knobs_on
from autotune.stats.deciding import EndedBy, Verdict
from autotune.stats.intervals import Interval
from autotune.stats.numerics import BatchLosses
from autotune.stats.stability import Check
from autotune.workloads.workload import DatasetConfig

if TYPE_CHECKING:
    import tensorflow as tf

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")
LARGEST_FILE_BYTES = 1 << 20
LONGEST_MESSAGE = 300

NonNegative = Annotated[FiniteFloat, Field(ge=0)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
"""Bytes, samples and the like; a number without end could not be divided, nor be shown."""


def _checked_knobs(values: dict[str, KnobValue]) -> dict[str, KnobValue]:
    try:
        configuration = Configuration(values)
    except ConfigurationError as error:
        raise ValueError(f"{error.message.removeprefix('configuration: ')} ({error.hint})") from error
    lacking = [
        [each.name for each in knobs_on(device) if each.name not in configuration and not each.of_workload]
        for device in Device
    ]
    fewest = min(lacking, key=len)
    if fewest:
        raise ValueError(f"has no {', '.join(fewest)}")
    return dict(configuration)


Knobs = Annotated[dict[str, Value], AfterValidator(_checked_knobs)]
"""A configuration in a file: knobs that exist, with values they can take, and every knob of one kind of device.

`apply` leaves a knob alone that is not there, so a recipe without it would run something that was never measured.
"""


_DAMAGED = "The file is damaged, or was not written by `autotune tune`."


def _one_line(what: object) -> str:
    """What a damaged file says of itself, fit to be a part of a message."""
    return one_line(what, longest=LONGEST_MESSAGE)


class MachineMismatchWarning(UserWarning):
    """The recipe was measured on a machine that differs from this one in what can change speed."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PeakMemory(_Part):
    """Largest memory, in bytes: of the process tree, and on the device (None without one)."""

    host: Count | None
    device: Count | None


class Stability(_Part):
    """What was checked of the recommended configuration, and what was not."""

    checks: Annotated[tuple[Check, ...], Field(fail_fast=True)]
    not_checked: Annotated[tuple[str, ...], Field(fail_fast=True)]


class Confirmation(_Part):
    """How the claim was measured.

    Args:
        processes: Fresh processes a side.
        pairs: Pairs of neighbouring slices.
        leaders: How many candidates were confirmed, one after another; the interval allows for all of them.
        looks: After how many processes a side the result was to be looked at; the interval allows for all looks.
        confidence: Of the interval, so that all looks at all leaders together err in at most 5%.
        pairing: `alternating` or `bracketed`.
        trials: Numbers of the trials in the run's history: the baseline's, then the leader's.
    """

    processes: Count
    pairs: Count
    leaders: Count
    looks: Annotated[tuple[Count, ...], Field(fail_fast=True)]
    confidence: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None
    pairing: Literal["alternating", "bracketed"] | None
    trials: Annotated[tuple[int, ...], Field(fail_fast=True)]


class BestCandidate(_Part):
    """What came closest, where it was not recommended; and why not.

    Args:
        configuration: Which.
        speedup: As confirmed so far; None where too little was measured for an interval.
        reason: Why it is not recommended, with the figure.
        search_speedup: What it looked like in the search: a hint, never a claim.
    """

    configuration: Knobs
    speedup: Interval | None
    reason: str
    search_speedup: NonNegative | None = None


class Watch(_Part):
    """A watch over the recommended configuration: one process trained without a pause (`--soak`).

    Args:
        seconds: How long.
        throughput: Samples per second; None where it failed before its first slice ended.
        checks: Of memory and hangs.
        failure: How it failed; empty where it did not.
    """

    seconds: NonNegative
    throughput: Interval | None
    checks: Annotated[tuple[Check, ...], Field(fail_fast=True)]
    failure: str = ""


class Evidence(_Part):
    """What the recommendation rests on.

    Args:
        verdict: `faster`, `no_significant_gain`, `undecided` or `unstable`; the configuration of the last three is the
            baseline's.
        ended_by: Why the run ended: `settled`, `exhausted`, `budget` or `interrupted`.
        min_gain: Smallest gain that counts, as a share.
        candidates: How many configurations were tried.
        excluded_gain: Gains above this share are excluded for all that was tried, with 95% confidence for all
            together; None where something is recommended, or nothing was measured.
        speedup: Of the recommended configuration over the baseline.
        throughput: Samples per second of the recommended configuration in a long training.
        baseline_throughput: Of the baseline, in the same minutes.
        compile_seconds: Trace and compile time of the recommended configuration.
        baseline_compile_seconds: The same of the baseline.
        break_even_samples: Samples after which the longer compile time is earned back; 0 when it is not longer.
        peak_memory_bytes: Of the recommended configuration.
        baseline_peak_memory_bytes: Of the baseline.
        input_wait_fraction: Share of the step spent waiting for input.
        stability: What was checked.
        confirmation: How it was measured.
        best_candidate: What came closest, when nothing is recommended.
        go_on_seconds: A budget with which `--resume` may settle an undecided run; None with the other verdicts.
        watch: What a watch at the end has shown; None without one.
    """

    verdict: Verdict
    ended_by: EndedBy
    min_gain: NonNegative
    candidates: Count
    excluded_gain: NonNegative | None
    speedup: Interval
    throughput: Interval
    baseline_throughput: Interval
    compile_seconds: NonNegative | None
    baseline_compile_seconds: NonNegative | None
    break_even_samples: Count | None
    peak_memory_bytes: PeakMemory
    baseline_peak_memory_bytes: PeakMemory
    input_wait_fraction: NonNegative | None
    stability: Stability
    confirmation: Confirmation
    best_candidate: BestCandidate | None = None
    go_on_seconds: NonNegative | None = None
    watch: Watch | None = None


class LearningRate(_Part):
    """A note for when the batch size changed: two usual rules for scaling the learning rate.

    Linear scaling suits SGD (Goyal et al., 2017, arXiv:1706.02677); square-root scaling suits Adam and its
    kin (Malladi et al., 2022, arXiv:2205.10287). Neither is applied by anything here.

    Args:
        batch_ratio: Recommended batch size over the baseline's.
        linear_scale: Factor for the learning rate by the linear rule.
        sqrt_scale: Factor by the square-root rule.
        losses: What each did in short trainings; None where they were not run.
    """

    batch_ratio: Positive
    linear_scale: Positive
    sqrt_scale: Positive
    losses: BatchLosses | None = None

    @classmethod
    def between(
        cls, batch_size: int, baseline: int, *, losses: BatchLosses | None = None
    ) -> LearningRate | None:
        """The note for a change of batch size; None when it did not change."""
        if batch_size == baseline:
            return None
        ratio = batch_size / baseline
        return cls(
            batch_ratio=ratio, linear_scale=ratio, sqrt_scale=round(math.sqrt(ratio), 4), losses=losses
        )


class RecipeWorkload(_Part):
    """What was trained.

    Args:
        name: The workload's name.
        fingerprint: `sha256:…` over its source file and name.
        batched: Whether its dataset does its own batching, by `config.batch_size`.
        drop_remainder: Whether a smaller last batch is dropped.
        takes_config: Whether its dataset() is told the configuration, as `Recipe.dataset_config`.
        examples: Per epoch; None when endless or unknown.
        batch_ranks: How many axes each tensor of a batch has, None where that varies; None when not known.
    """

    name: str
    fingerprint: str
    batched: bool = False
    drop_remainder: bool = False
    takes_config: bool = False
    examples: Count | None = None
    batch_ranks: Annotated[tuple[Count | None, ...], Field(fail_fast=True)] | None = None


class CreatedBy(_Part):
    """Provenance: which run of which version, when, with what limits."""

    autotune: str
    run: str
    created_at: str
    search_space: str
    trials: Count
    seed: int
    budget_seconds: NonNegative
    spent_seconds: NonNegative


class Recipe(_Part):
    """The fastest stable configuration of a training on a machine, with the evidence for it.

    Example:
        >>> recipe = Recipe.load("recipe.json")
        >>> recipe.apply()
        >>> model.compile("adam", "mse", **recipe.compile_args())
        >>> model.fit(**recipe.fit_args(dataset), epochs=90)
    """

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    configuration: Knobs
    baseline: Knobs
    evidence: Evidence
    learning_rate: LearningRate | None
    machine: Machine
    workload: RecipeWorkload
    created_by: CreatedBy

    @model_validator(mode="after")
    def _same_knobs_everywhere(self) -> Self:
        sides = {"configuration": self.configuration, "baseline": self.baseline}
        for (has, one), (lacks, other) in itertools.permutations(sides.items()):
            missing = ", ".join(name for name in one if name not in other)
            if missing:
                raise ValueError(f"{lacks} has no {missing}, and {has} has")
        return self

    # -------------------------------------------------------------------------------------------- the file

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a recipe.

        Raises:
            RecipeError: The file is missing, damaged, or written by a newer version.
        """
        hint = "Give the path of a recipe.json, as printed by `autotune tune`."
        try:
            text = read_at_most(Path(path), LARGEST_FILE_BYTES)
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RecipeError(f"cannot read the recipe {_one_line(path)}: {reason}", hint=hint) from error
        if len(text) > LARGEST_FILE_BYTES:
            raise RecipeError(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, so not a recipe", hint=hint)
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str | bytes, *, source: str) -> Self:
        """Read a recipe from JSON text.

        Args:
            text: The JSON.
            source: Where it comes from, for messages.

        Raises:
            RecipeError: It is damaged, or written by a newer version.
        """
        try:
            recipe = cls.model_validate_json(text)
        except ValidationError as error:
            where, mistake = first_mistake(error)
            if where == "schema_version":
                raise RecipeError(
                    f"{source}: this autotune reads recipes of schema_version {SCHEMA_VERSION} only",
                    hint="Install the autotune that wrote it, or a later one.",
                ) from error
            what = _one_line(f"{where or 'the file'}: {mistake.removeprefix('Value error, ')}")
            raise RecipeError(f"{source}: not a recipe: {what}", hint=_DAMAGED) from error
        if "schema_version" not in recipe.model_fields_set:
            raise RecipeError(f"{source}: not a recipe: schema_version is missing", hint=_DAMAGED)
        return recipe

    def to_json(self) -> str:
        """The recipe as it is written to a file."""
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the recipe, whole or not at all.

        Raises:
            RunDirectoryError: The place cannot be written.
        """
        write_atomically(Path(path), self.to_json())

    # ----------------------------------------------------------------------------------------- in training

    def apply(self, *, on_mismatch: Literal["warn", "error", "ignore"] = "warn") -> None:
        """Set threads, precision and the like: before TensorFlow makes its first tensor, dataset or model.

        This is what the trial processes ran. It also turns on memory growth on every GPU, as they did.

        Args:
            on_mismatch: What to do where this machine differs from the recipe's in what can change speed.

        Raises:
            ApplyError: Too late: TensorFlow's runtime has started, or one of the knobs cannot act any more; the
                message says what to move.
            ArgumentError: `on_mismatch` is none of the three.
            MachineMismatchError: With `on_mismatch="error"`.
        """
        if on_mismatch not in ("warn", "error", "ignore"):
            raise ArgumentError(
                f"recipe.apply(on_mismatch={on_mismatch!r})", hint="It is 'warn', 'error' or 'ignore'."
            )
        differences = [] if on_mismatch == "ignore" else self.machine.differences(fingerprint())
        if differences:
            what = "the recipe was measured on another machine: " + "; ".join(map(_one_line, differences))
            hint = "Tune again here, or pass on_mismatch='ignore'."
            if on_mismatch == "error":
                raise MachineMismatchError(what, hint=hint)
            warnings.warn(f"{what}. {hint}", MachineMismatchWarning, stacklevel=2)
        apply.apply_in_training(self.configuration)

    def compile_args(self) -> dict[str, KnobValue]:
        """Keyword arguments for `model.compile`: `jit_compile` and `steps_per_execution`."""
        return apply.compile_arguments(self.configuration)

    @property
    def dataset_config(self) -> DatasetConfig:
        """What the workload's `dataset(config)` was told in the trials."""
        return DatasetConfig.of(Configuration(self.configuration))

    @property
    def batch_size(self) -> int:
        """Examples per step."""
        return Configuration(self.configuration).batch_size

    def batch(self, dataset: tf.data.Dataset, *, drop_remainder: bool | None = None) -> tf.data.Dataset:
        """Batch and prefetch a dataset of single examples as in the trials.

        A workload that does its own batching (`batched=True`) hands in batches of `dataset_config.batch_size`.
        The batches never repeat, so validation data ends. `fit_args` prepares training data.

        Args:
            dataset: Single examples, or batches with `batched=True`.
            drop_remainder: Whether a smaller last batch is dropped; as in the workload when None. Trials never
                drop it from validation data.

        Returns:
            A dataset of batches. It ends where `dataset` ends.

        Raises:
            ApplyError: The dataset is batched and the workload's was not, or the other way round.
        """
        batches = apply.pipeline(dataset, Configuration(self.configuration), **self._batching(drop_remainder))
        self._refuse_other_ranks(batches, dataset)
        return batches

    def fit_args(
        self,
        dataset: tf.data.Dataset,
        *,
        drop_remainder: bool | None = None,
        steps_per_execution: int | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of `model.fit` for the training data: `x`, and `steps_per_epoch` where it is needed.

        With the knob `persistent_iterator`, `x` repeats without an end and `steps_per_epoch` ends each epoch. Without
        it, and for datasets of unknown or infinite cardinality, `x` is `batch(dataset)` and the only argument. Use
        `batch` if you give `fit` a `steps_per_epoch` of your own.

        Args:
            dataset: Single examples, or batches with `batched=True`.
            drop_remainder: Whether a smaller last batch is dropped; as in the workload when None.
            steps_per_execution: What the model is compiled with; as in `compile_args()` when None.

        Raises:
            ApplyError: `steps_per_execution` does not divide the steps of an epoch, so an epoch would run past its
                end. Or the dataset is batched and the workload's was not, or the other way round.
        """
        configuration = Configuration(self.configuration)
        if steps_per_execution is not None:
            configuration = configuration.replace(steps_per_execution=steps_per_execution)
        training = apply.training_pipeline(dataset, configuration, **self._batching(drop_remainder))
        self._refuse_other_ranks(training.dataset, dataset)
        compiled, divides = configuration["steps_per_execution"], training.in_force["steps_per_execution"]
        if compiled != divides:
            raise ApplyError(
                f"steps_per_execution={compiled} does not divide the {training.steps_per_epoch} steps of an epoch",
                hint=f'Call model.compile(..., **recipe.compile_args() | {{"steps_per_execution": {divides}}}) and '
                f"recipe.fit_args(dataset, steps_per_execution={divides}).",
            )
        return training.fit_args

    def _batching(self, drop_remainder: bool | None) -> dict[str, bool]:
        drop = self.workload.drop_remainder if drop_remainder is None else drop_remainder
        return {"batched": self.workload.batched, "drop_remainder": drop}

    def _refuse_other_ranks(self, batches: tf.data.Dataset, dataset: tf.data.Dataset) -> None:
        """Refuse batches of batches, and single examples in place of batches."""
        pairs = zip(apply.batch_ranks(batches), self.workload.batch_ranks or (), strict=False)
        excess = {None if a is None or b is None else a - b for a, b in pairs}
        if excess == {1} and not self.workload.batched and apply.looks_batched(dataset):
            raise ApplyError(
                "the recipe was given a dataset that is batched already",
                hint="Hand over single examples, without .batch(): the recipe batches them.",
            )
        if excess == {-1} and self.workload.batched:
            raise ApplyError(
                "the recipe was given single examples, and the tuned workload did its own batching",
                hint="Batch the dataset first, by recipe.dataset_config.batch_size.",
            )

    @property
    def changes(self) -> Mapping[str, KnobValue]:
        """The knobs in which the configuration differs from the baseline."""
        return Configuration(self.configuration).differences(Configuration(self.baseline))
