"""Say once, in a long training, what has changed since its recipe was measured, and how to measure it again."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.data.facts import Machine
from autotune.data.options import VERIFY_SECONDS
from autotune.machine.fingerprint import describe_changes
from autotune.recipe.guard import say

if TYPE_CHECKING:
    from autotune.recipe.recipe import Recipe


class Staleness:
    """The changes since a recipe was measured, said once.

    `here` is this machine; None where a change of it is not to be said.
    """

    def __init__(self, recipe: Recipe, command: str, *, here: Machine | None, say: Callable[[str], None] = say) -> None:
        self._changes = [] if here is None else list(recipe.machine.differences(here))
        self._parameters, self._command, self._say = recipe.workload.parameters, command, say
        self._said = not recipe.changes

    def warn(self, parameters: int | None) -> None:
        """Say it once, if there is anything. `parameters`: the weights of the model; None where it is not built yet."""
        if self._said:
            return
        self._said = True
        changes = list(self._changes)
        if parameters is not None and self._parameters is not None and parameters != self._parameters:
            changes.append(f"the model: measured with {self._parameters:,} weights, here {parameters:,}")
        if changes:
            self._say(describe_changes(changes, self._command))


def verify_command(recipe: Recipe, path: Path, script: str) -> str:
    """Return the command that measures a recipe's claim again, with a budget that suffices."""
    seconds = recipe.evidence.verify_seconds or VERIFY_SECONDS
    return f"{shlex.join(['autotune', 'verify', str(path), script])} --budget {seconds:.0f}s"
