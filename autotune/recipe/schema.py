"""The JSON Schemas of recipe and book. After a change of the models, `python -m autotune.recipe.schema` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.data.files import write_atomically
from autotune.recipe.recipe import MOST_RECIPES, SCHEMA_FILE, SCHEMA_VERSION, Recipe

BOOK_SCHEMA_FILE = Path(__file__).with_name("book.schema.json")
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NAME = f"autotune-recipe-{SCHEMA_VERSION}"


def recipe_schema() -> dict[str, Any]:
    """Return the schema of the models. A file must name its version, which the models fill in."""
    schema = Recipe.model_json_schema()
    about = {"$schema": _DIALECT, "$id": _NAME}
    return {**about, **schema, "title": _NAME, "required": ["schema_version", *schema["required"]]}


def book_schema() -> dict[str, Any]:
    """Return the schema of a book, which refers to that of the recipe."""
    name = f"autotune-book-{SCHEMA_VERSION}"
    return {
        "$schema": _DIALECT,
        "$id": name,
        "title": name,
        "description": "Recipes of one training, each of another kind of machine.",
        "type": "object",
        "properties": {
            "schema_version": {"const": SCHEMA_VERSION},
            "recipes": {"type": "array", "items": {"$ref": _NAME}, "minItems": 1, "maxItems": MOST_RECIPES},
        },
        "required": ["schema_version", "recipes"],
        "additionalProperties": False,
    }


def schema_text(schema: dict[str, Any]) -> str:
    """Return the text of a schema's file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    write_atomically(SCHEMA_FILE, schema_text(recipe_schema()))
    write_atomically(BOOK_SCHEMA_FILE, schema_text(book_schema()))
