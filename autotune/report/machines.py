"""Compare the recipes of one training on several machines: what each recommends, and what all of them recommend."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.machine.kind import kind_of
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration, format_value
from autotune.stats.deciding import Verdict


def row_of(recipe: Recipe) -> tuple[str, str, str]:
    """Return the machine of a recipe, its claim, and what it recommends; the texts may come from other people."""
    verdict, changes, answer = recipe.evidence.verdict, Configuration(recipe.configuration), recipe.answer
    return (
        str(kind_of(recipe.machine)),
        f"{answer.speedup.shown()} {answer.unit}" if verdict is Verdict.FASTER else verdict.value.replace("_", " "),
        changes.describe(Configuration(recipe.baseline)) if recipe.changes else "the baseline",
    )


def describe_transfer(recipes: Sequence[Recipe]) -> list[str]:
    """Say which changes carry over between the machines, and which do not; nothing where there is none to compare."""
    recommending = [recipe for recipe in recipes if recipe.changes]
    kinds = [kind_of(recipe.machine) for recipe in recommending]
    if len(set(kinds)) < 2:
        return []
    changes = [[f"{name}={format_value(value)}" for name, value in recipe.changes.items()] for recipe in recommending]
    shared = [change for change in changes[0] if all(change in others for others in changes)]
    are_devices_unlike = len({kind.device for kind in kinds}) == len(kinds)
    own: dict[str, list[str]] = {}
    for made, kind in zip(changes, kinds, strict=True):
        for change in made:
            if change not in shared:
                own.setdefault(change, []).append(kind.device if are_devices_unlike else str(kind))
    where = f"each of the {len(recommending)} machines with a recommendation"
    lines = [f"Carries over to {where}: {' '.join(shared) or 'nothing'}"]
    if own:
        places = "; ".join(f"{change} (only {', and '.join(devices)})" for change, devices in own.items())
        lines.append(f"Does not carry over: {places}")
    return lines
