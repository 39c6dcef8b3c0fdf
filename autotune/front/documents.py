"""The JSON that commands print with `--json`: one model for each command. docs/history.md describes the fields.

`python -m autotune.front.documents` prints the JSON Schema of all of them; with the word `recipe`, that of the recipe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

import pandas as pd
from pandas.api.extensions import ExtensionDtype
from pydantic import AwareDatetime, BeforeValidator, Field, TypeAdapter, create_model

from autotune.data.figures import Interval
from autotune.data.models import Frozen, Value
from autotune.machine.doctor import Level
from autotune.recipe.answer import Answer
from autotune.recipe.evidence import SCHEMA_VERSION
from autotune.recipe.recipe import Recipe
from autotune.report.history import BOOLEAN, COLUMNS, FLOAT, INTEGER, TIME, columns
from autotune.space.knobs import Device, Domain, Numerics, Stage
from autotune.stats.deciding import ClaimResult
from autotune.tuning.self_test import SelfTest

_TYPES: dict[Any, Any] = {BOOLEAN: bool, INTEGER: int, FLOAT: float, TIME: AwareDatetime}


def _model(name: str, fields: Mapping[str, Any]) -> Any:
    kinds: dict[str, Any] = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, __base__=Frozen, **kinds)


def _row_model(name: str, columns: Mapping[str, ExtensionDtype]) -> Any:
    """Return the model of a table's rows: a field for each column, null for NA."""
    kinds = {
        column: Literal[tuple(dtype.categories)] if isinstance(dtype, pd.CategoricalDtype) else _TYPES.get(dtype, str)
        for column, dtype in columns.items()
    }
    return _model(name, {column: kind | None for column, kind in kinds.items()})


_TRIALS = {"trials": list[_row_model("TrialRow", columns())]}  # type: ignore[misc]  # made of the columns
_KNOB = {"name": str, "summary": str, "domain": Domain, "default": Value | None, "stage": Stage, "numerics": Numerics}
_KNOB_ENTRY = _model("KnobEntry", _KNOB | {"devices": Annotated[list[Device], BeforeValidator(sorted)]})
_FIELDS: dict[str, dict[str, Any]] = {
    "tune": {"run": str, "recipe_file": str, "recipe": Recipe, "answer": Answer},
    "run": {
        "recipe_file": str | None,
        "script": str,
        "exit_code": int,
        "throughput": float | None,
        "claimed": float | None,
    },
    "verify": {"recipe_file": str, "finding": ClaimResult, "reason": str, "instances": int}
    | dict.fromkeys(("claimed", "measured"), Interval | None),
    "show": {"run": str | None, "recipe_file": str | None, "recipe": Recipe | None, "recipes": dict[str, Recipe]}
    | {"answer": Answer | None}
    | _TRIALS,
    "compare": {"runs": list[_row_model("RunRow", COLUMNS)]},  # type: ignore[misc]
    "knobs": {"knobs": list[_KNOB_ENTRY]},  # type: ignore[valid-type]
    "doctor": {
        "findings": list[_model("FindingEntry", {"level": Level, "text": str, "fix": str})],  # type: ignore[misc]
        "first": str | None,
        "self_test": SelfTest | None,
    },
}
MODELS = {
    command: _model(
        f"{command.capitalize()}Document", {"schema_version": Literal[1], "command": Literal[command], **fields}
    )
    for command, fields in _FIELDS.items()
}
_ANY: Any = Annotated[reduce(or_, MODELS.values()), Field(discriminator="command")]
DOCUMENTS: TypeAdapter[Any] = TypeAdapter(_ANY)
"""Reads the output of any command."""


def print_document(command: str, *, on_one_line: bool = False, **fields: Any) -> None:
    """Print the document of a command on standard output."""
    document = MODELS[command].model_validate({"schema_version": 1, "command": command, **fields}, from_attributes=True)
    sys.stdout.write(document.model_dump_json(indent=None if on_one_line else 2) + "\n")
    sys.stdout.flush()


def schema_text() -> str:
    """Return the JSON Schema of all documents."""
    return _schema_text("autotune-json-1", DOCUMENTS.json_schema(mode="serialization"))


def recipe_schema_text() -> str:
    """Return the JSON Schema of the recipe. A file must name its version, which the models fill in."""
    name, schema = f"autotune-recipe-{SCHEMA_VERSION}", Recipe.model_json_schema()
    return _schema_text(name, {**schema, "title": name, "required": ["schema_version", *schema["required"]]})


def _schema_text(name: str, schema: dict[str, Any]) -> str:
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name}
    return json.dumps({**about, **schema}, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(recipe_schema_text() if sys.argv[1:] == ["recipe"] else schema_text())
