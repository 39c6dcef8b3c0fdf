"""The JSON Schema of the recipe. After a change of the models, `python -m autotune.recipe.schema` writes it."""

from __future__ import annotations

import json
from typing import Any

from autotune.data.files import write_atomically
from autotune.recipe.evidence import SCHEMA_VERSION
from autotune.recipe.recipe import SCHEMA_FILE, Recipe

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NAME = f"autotune-recipe-{SCHEMA_VERSION}"


def recipe_schema() -> dict[str, Any]:
    """Return the schema of the models. A file must name its version, which the models fill in."""
    schema = Recipe.model_json_schema()
    about = {"$schema": _DIALECT, "$id": _NAME}
    return {**about, **schema, "title": _NAME, "required": ["schema_version", *schema["required"]]}


def schema_text(schema: dict[str, Any]) -> str:
    """Return the text of a schema's file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    write_atomically(SCHEMA_FILE, schema_text(recipe_schema()))
