"""The values that a script runs with: its own, or a configuration's where that differs. No TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from autotune.data.errors import ApplyError
from autotune.data.facts import ScriptFacts, Site
from autotune.data.models import KnobValue
from autotune.space.configuration import Configuration
from autotune.space.knobs import AS_WRITTEN, KNOBS, check_value

AUTOTUNE = -1  # tf.data.AUTOTUNE
ARGUMENTS = {"batch_size": "batch_size", "num_parallel_calls": "num_parallel_calls", "prefetch": "buffer_size"}
"""The keyword by which a call of `tf.data` takes a knob."""
CALLS = {
    "batch": "batch_size",
    "padded_batch": "batch_size",
    "ragged_batch": "batch_size",
    "map": "num_parallel_calls",
    "interleave": "num_parallel_calls",
    "prefetch": "prefetch",
}
"""The knob that a method of a dataset takes."""
_Key = tuple[str, str, str, int]
_settings: Any = None  # those of this process, where it is a trial or uses a recipe
_watch: Any = None
_on_access: Callable[[], None] | None = None
given_values: dict[str, Any] = {}
"""The script's own values of the knobs that it has asked for."""


@dataclass
class Settings:
    """The values that are changed in a script, by knob."""

    changes: dict[str, KnobValue] = field(default_factory=dict)  # of the knobs whose value is not the script's own
    vectorized: bool = False  # `batched_map` is by `tf.vectorized_map`
    own: dict[str, KnobValue] = field(default_factory=dict)  # a call that was given another value is left alone
    sites: dict[str, frozenset[_Key]] = field(default_factory=dict)  # call sites that a knob reaches
    cache_file_bytes: int = 0  # see `ScriptFacts`
    reached: set[_Key] = field(default_factory=set)  # call sites that the script has passed
    first: dict[str, KnobValue] = field(default_factory=dict)  # what the script gave first, where a value is set once

    @classmethod
    def from_configuration(cls, configuration: Mapping[str, KnobValue], facts: ScriptFacts) -> Settings:
        """Return the settings of a configuration."""
        usual = {name: KNOBS[name].default for name in configuration if KNOBS[name].default is not None}
        own = Configuration({**usual, **facts.baseline})
        changes = Configuration({name: value for name, value in configuration.items() if name in own})
        return cls(
            own=dict(facts.baseline),
            vectorized=facts.vectorized,
            changes={name: value for name, value in changes.differences(own).items() if value != AS_WRITTEN},
            sites={name: frozenset(site.key for site in sites) for name, sites in facts.sites.items()},
            cache_file_bytes=facts.cache_file_bytes,
        )

    def at(self, knob: str, site: Site, given: Any) -> Any:
        """Return the value to use at a call site: the script's, or the knob's."""
        if site.key not in self.sites.get(knob, ()):
            return given
        written = self.own.get(knob)
        if written != AS_WRITTEN and written != as_knob(given):
            return given
        self.reached.add(site.key)
        used = self.changes.get(knob, given)
        return AUTOTUNE if isinstance(used, str) else used

    def value(self, knob: str, given: Any) -> Any:
        """Return the value of a knob without call sites."""
        return self.changes.get(knob, given)

    def value_once(self, knob: str, given: KnobValue) -> KnobValue:
        """Return the value of a knob where the script gave its first value, and any other value as it was given.

        A script that runs out of memory may try again with a smaller batch.
        """
        return self.value(knob, given) if given == self.first.setdefault(knob, given) else given

    def refuse_missing(self, facts: ScriptFacts, *, skip: bool = False) -> list[str]:
        """Return the changed knobs that have a call site which the script has not passed.

        Raises:
            ApplyError: There is one, and it may not be skipped.
        """
        sites = {knob: facts.sites.get(knob, ()) for knob in self.changes}
        lost = {knob: [site for site in sites[knob] if site.key not in self.reached] for knob in sites}
        missing = [knob for knob in lost if lost[knob]]
        if missing and not skip:
            raise ApplyError(
                f"{missing[0]} was set at {lost[missing[0]][0]}, "
                "and the script has no such call on its way to the training any more",
                hint="Tune the script again, or pass --skip-missing to continue without that knob.",
            )
        return missing


def as_knob(given: Any) -> KnobValue:
    """Return an argument of a call as a knob's value: None is 0, and -1 is `autotune`."""
    if isinstance(given, bool | str):
        return given
    number = 0 if given is None else int(given)
    return "autotune" if number == -1 else number


def serve_script(*, settings: Any = None, watch: Any = None, on_access: Callable[[], None] | None = None) -> None:
    """Return the values of these settings to the script, and report its explicit steps to this watch, from now on.

    `on_access` is called before the script gets either.
    """
    global _settings, _watch, _on_access
    _settings, _watch, _on_access = settings or _settings, watch or _watch, on_access or _on_access


def tuned(**values: Any) -> SimpleNamespace:
    """Return the values to use for knobs that the script computes with: its own, unless a trial or recipe has others.

    Args:
        values: The script's own values, by the names of knobs.

    Raises:
        ConfigurationError: There is no such knob, or it cannot have that value.

    Example:
        >>> settings = autotune.tuned(batch_size=32)
        >>> steps = examples // settings.batch_size
    """
    for name, value in values.items():
        check_value(name, value, where="autotune.tuned()")
    given_values.update(values)
    if _on_access is not None:
        _on_access()
    changed = {} if _settings is None else {name: _settings.value_once(name, values[name]) for name in values}
    return SimpleNamespace(**values | changed)


def steps(dataset: Any) -> Iterator[Any]:
    """Yield the elements of a dataset, each of which is one step of the training: for loops autotune cannot observe.

    Such a loop updates weights without an optimizer of Keras. Outside trials this only yields the elements.

    Args:
        dataset: The training data: a `tf.data.Dataset` of batches, or anything that can be iterated.

    Example:
        >>> for x, y in autotune.steps(batches):
        ...     my_step(x, y)
    """
    if _on_access is not None:
        _on_access()
    yield from dataset if _watch is None else _watch.explicit(dataset)
