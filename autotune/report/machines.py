"""Compare the recipes of one training on several machines: what each recommends, and what all of them recommend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autotune.machine.kind import kind_of
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration, format_value
from autotune.stats.deciding import Verdict


class MachineRow(NamedTuple):
    """A recipe as a row of a table; its texts may come from other people."""

    machine: str
    claim: str
    recommended: str
    limited_by: str  # `launch → compute` where the recommendation moves the bottleneck; empty if not known


def row_of(recipe: Recipe) -> MachineRow:
    """Return the row of a recipe."""
    verdict, changes = recipe.evidence.verdict, Configuration(recipe.configuration)
    limits = dict.fromkeys(filter(None, (recipe.evidence.baseline_limited_by, recipe.evidence.limited_by)))
    return MachineRow(
        machine=str(kind_of(recipe.machine)),
        claim=recipe.evidence.speedup.shown() if verdict is Verdict.FASTER else verdict.value.replace("_", " "),
        recommended=changes.describe(Configuration(recipe.baseline)) if recipe.changes else "the baseline",
        limited_by=" → ".join(name.replace("_", " ") for name in limits),
    )


def changes_of(recipe: Recipe) -> list[str]:
    """Return what a recipe changes: `batch_size=256`, `jit_compile=true`."""
    return [f"{name}={format_value(value)}" for name, value in recipe.changes.items()]


def shared_changes(recipes: Iterable[Recipe]) -> list[str] | None:
    """Return the changes that all recipes with a recommendation make; None where they are of fewer than two kinds."""
    recommending = [recipe for recipe in recipes if recipe.changes]
    if len({kind_of(recipe.machine) for recipe in recommending}) < 2:
        return None
    others = [set(changes_of(recipe)) for recipe in recommending[1:]]
    return [change for change in changes_of(recommending[0]) if all(change in other for other in others)]


def describe_transfer(recipes: Sequence[Recipe]) -> list[str]:
    """Say which changes carry over between the machines, and which do not; nothing where there is none to compare."""
    shared = shared_changes(recipes)
    if shared is None:
        return []
    recommending = [recipe for recipe in recipes if recipe.changes]
    kinds = [kind_of(recipe.machine) for recipe in recommending]
    are_devices_unlike = len({kind.device for kind in kinds}) == len(kinds)
    own: dict[str, list[str]] = {}
    for recipe, kind in zip(recommending, kinds, strict=True):
        for change in changes_of(recipe):
            if change not in shared:
                own.setdefault(change, []).append(kind.device if are_devices_unlike else str(kind))
    where = f"each of the {len(recommending)} machines with a recommendation"
    lines = [f"Carries over to {where}: {' '.join(shared) or 'nothing'}"]
    if own:
        places = "; ".join(f"{change} (only {', and '.join(devices)})" for change, devices in own.items())
        lines.append(f"Does not carry over: {places}")
    return lines
