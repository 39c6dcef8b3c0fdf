"""The JSON that commands print with `--json`, as models; docs/json.md describes it.

`python -m autotune.front.documents` prints the JSON Schema of all of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pandas as pd
from pandas.api.extensions import ExtensionDtype
from pydantic import AwareDatetime, Field, TypeAdapter, create_model

from autotune.data.figures import Interval
from autotune.data.models import Frozen, Value
from autotune.data.run_directory import RunDirectory
from autotune.front.closing import resume_command
from autotune.machine.doctor import Finding, Level, first_fix
from autotune.recipe.advice import usage
from autotune.recipe.recipe import Recipe
from autotune.report.compare import COLUMNS
from autotune.report.history import BOOLEAN, FLOAT, INTEGER, TIME, columns, load_history, rows_of
from autotune.space.knobs import KNOBS, Device, Numerics, Stage
from autotune.stats.deciding import ClaimResult

if TYPE_CHECKING:
    from autotune.tuning.self_test import SelfTest
    from autotune.tuning.verify import Verification

_TYPES: dict[Any, Any] = {BOOLEAN: bool, INTEGER: int, FLOAT: float, TIME: AwareDatetime}


def _row_model(name: str, columns: Mapping[str, ExtensionDtype]) -> type[Frozen]:
    """Return the model of a table's rows, with a field for each column."""
    fields: dict[str, Any] = {}
    for column, dtype in columns.items():
        kind = _TYPES.get(dtype, str)
        if isinstance(dtype, pd.CategoricalDtype):
            kind = Literal[tuple(dtype.categories)]
        fields[column] = (kind | None, ...)
    return create_model(name, __base__=Frozen, __doc__=f"A row of the table, `{name}`.", **fields)


TrialRow = _row_model("TrialRow", columns())
RunRow = _row_model("RunRow", COLUMNS)


class Document(Frozen):
    """The output of a command."""

    schema_version: Literal[1] = 1


class TuneDocument(Document):
    """A tuning that has ended."""

    command: Literal["tune"] = "tune"
    run: str = Field(description="The run directory.")
    recipe_file: str
    recipe: Recipe
    use: tuple[str, ...] = Field(description="Lines that train with the recipe; empty where nothing is to be changed.")
    go_on: str | None = Field(description="The command that continues an undecided run.")


class RunDocument(Document):
    """A script that ran with a recipe, and its speed; a single line, the last of standard output."""

    command: Literal["run"] = "run"
    recipe_file: str
    script: str
    exit_code: int = Field(description="The script's own.")
    throughput: float | None = Field(description="Samples per second; null if it trained for too short a time to tell.")
    claimed: float = Field(description="Samples per second that the recipe claims.")


class VerifyDocument(Document):
    """A claim that was measured again."""

    command: Literal["verify"] = "verify"
    recipe_file: str
    finding: ClaimResult
    claimed: Interval | None = Field(description="The recipe's speed-up; null where it claims none.")
    measured: Interval | None = Field(description="The speed-up here and now; null where too little was measured.")
    instances: int = Field(description="Fresh processes a side.")
    reason: str


class ShowDocument(Document):
    """A recipe, or a run with its trials."""

    command: Literal["show"] = "show"
    run: str | None = Field(description="The run directory; null where a recipe was given.")
    recipe_file: str | None = Field(description="Null where the run has no recipe.")
    recipe: Recipe | None
    trials: tuple[TrialRow, ...]  # type: ignore[valid-type]  # a model made of the table's columns


class HistoryDocument(Document):
    """The trials of runs, as `autotune.load_history` returns them."""

    command: Literal["history"] = "history"
    trials: tuple[TrialRow, ...]  # type: ignore[valid-type]


class CompareDocument(Document):
    """Runs side by side, as `autotune.compare` returns them."""

    command: Literal["compare"] = "compare"
    runs: tuple[RunRow, ...]  # type: ignore[valid-type]


class KnobEntry(Frozen):
    """A knob."""

    name: str
    summary: str
    values: str = Field(description="In words.")
    default: Value | None = Field(description="TensorFlow's; null where the workload decides.")
    stage: Stage = Field(description="When it acts.")
    numerics: Numerics = Field(description="What it may change in the numbers that a training computes.")
    devices: tuple[Device, ...]


class KnobsDocument(Document):
    """All knobs."""

    command: Literal["knobs"] = "knobs"
    knobs: tuple[KnobEntry, ...]


class FindingEntry(Frozen):
    """Something that the doctor found."""

    level: Level
    text: str
    fix: str = Field(description="Empty where there is nothing to do.")


class SelfTestEntry(Frozen):
    """What a self-test measured. Ratios are of speeds."""

    passed: bool
    same: Interval = Field(description="A training against itself: it should hold 1.")
    planted: float = Field(description="The ratio that the planted delay makes.")
    found: Interval = Field(description="The same as measured.")
    instances: tuple[int, int] = Field(description="Fresh processes a side, of both.")
    gains: dict[int, float] = Field(description="By minutes: the smallest gain that a run can show, as a share.")


class DoctorDocument(Document):
    """What keeps TensorFlow from this machine's devices, or makes it slow."""

    command: Literal["doctor"] = "doctor"
    findings: tuple[FindingEntry, ...]
    first: str | None = Field(description="What to do first.")
    self_test: SelfTestEntry | None = Field(description="Of `--self-test`.")


AnyDocument = Annotated[
    TuneDocument
    | RunDocument
    | VerifyDocument
    | ShowDocument
    | HistoryDocument
    | CompareDocument
    | KnobsDocument
    | DoctorDocument,
    Field(discriminator="command"),
]
DOCUMENTS: TypeAdapter[Any] = TypeAdapter(AnyDocument)
"""Reads the output of any command."""


def tune_document(recipe: Recipe, file: Path, *, tuned: str, to_repeat: Sequence[str]) -> TuneDocument:
    """Return how a tuning ended; `tuned` is the workload as the user wrote it."""
    seconds = recipe.evidence.go_on_seconds
    return TuneDocument(
        run=str(file.parent),
        recipe_file=str(file),
        recipe=recipe,
        use=tuple(usage(recipe, file, tuned)) if recipe.changes else (),
        go_on=None if seconds is None else resume_command(tuned, file.parent, to_repeat, seconds=seconds),
    )


def show_document(path: Path) -> ShowDocument:
    """Return a recipe, or a run with its trials and its recipe."""
    if not os.path.isdir(path):  # Path.is_dir raises on a name that is too long
        return ShowDocument(run=None, recipe_file=str(path), recipe=Recipe.load(path), trials=())
    trials, file = trial_rows(load_history(path, every_column=True)), RunDirectory(path).recipe_file
    if not file.exists():
        return ShowDocument(run=str(path), recipe_file=None, recipe=None, trials=trials)
    return ShowDocument(run=str(path), recipe_file=str(file), recipe=Recipe.load(file), trials=trials)


def verify_document(recipe_file: Path, verification: Verification) -> VerifyDocument:
    """Return a verification as a document."""
    return VerifyDocument(recipe_file=str(recipe_file), **vars(verification))


def trial_rows(frame: pd.DataFrame) -> tuple[Frozen, ...]:
    """Return the rows of a history."""
    return tuple(TrialRow(**row) for row in rows_of(frame))


def compare_document(frame: pd.DataFrame) -> CompareDocument:
    """Return a comparison as a document."""
    return CompareDocument(runs=tuple(RunRow(**row) for row in rows_of(frame)))


def knobs_document() -> KnobsDocument:
    """Return all knobs as a document."""
    return KnobsDocument(
        knobs=tuple(
            KnobEntry(
                name=knob.name,
                summary=knob.summary,
                values=knob.domain.describe(),
                default=knob.default,
                stage=knob.stage,
                numerics=knob.numerics,
                devices=tuple(sorted(knob.devices)),
            )
            for knob in KNOBS.values()
        )
    )


def doctor_document(findings: Sequence[Finding], tested: SelfTest | None) -> DoctorDocument:
    """Return the doctor's findings as a document."""
    entries = tuple(FindingEntry(**finding._asdict()) for finding in findings)
    entry = None if tested is None else SelfTestEntry(passed=tested.passed, **vars(tested))
    return DoctorDocument(findings=entries, first=first_fix(findings) or None, self_test=entry)


def print_document(document: Document, *, on_one_line: bool = False) -> None:
    """Print a document on standard output."""
    sys.stdout.write(document.model_dump_json(indent=None if on_one_line else 2) + "\n")
    sys.stdout.flush()


def schema_text() -> str:
    """Return the JSON Schema of all documents, which `command` tells apart."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "autotune-json-1"}
    return json.dumps({**about, **DOCUMENTS.json_schema(mode="serialization")}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
