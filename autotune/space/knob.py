"""What a knob is: its values, when it acts, and all else that an entry of the table holds.

This module may not import TensorFlow, Keras or Optuna.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.data.models import KnobValue
from autotune.space.probes import Probe

AS_WRITTEN = "as_written"
"""Of a script's calls that differ among themselves: each keeps its own value."""


def alike(value: KnobValue) -> int:
    """Ranks the values of a knob that takes the same memory with each."""
    return 0


class Stage(enum.StrEnum):
    """When a knob acts. All setters and readers of a stage take the same target."""

    IMPORT = "import"  # TensorFlow reads the environment. Target: the variables, as a dict
    START = "start"  # TensorFlow's runtime starts, and reads the environment. Target: the variables, as a dict
    RUNTIME = "runtime"  # the first tensor, dataset or model starts TensorFlow's runtime. Target: `tensorflow`
    BUILD = "build"  # layers are constructed. Target: the module `tensorflow`
    PIPELINE = "pipeline"  # the pipeline is built. Target: the dataset of batches; the setter returns a new one
    OPTIONS = "options"  # the pipeline gets its options. Target: a `tf.data.Options`
    SCOPE = "scope"  # the model is built and compiled: it decides in the scope of which `tf.distribute` strategy
    COMPILE = "compile"  # the knob is an argument of `model.compile`, without a setter
    OPTIMIZER = "optimizer"  # the model is compiled, see `apply.accumulate`


class Device(enum.StrEnum):
    """What a training runs on."""

    CPU = "cpu"
    GPU = "gpu"


class Numerics(enum.StrEnum):
    """What a knob changes in the numbers that a training computes."""

    SAME = "same"
    EXAMPLES = "examples"  # other examples share a step, or steps come in another order
    ARITHMETIC = "arithmetic"  # the same examples give other numbers: the losses must be compared


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The values a knob can take: integers in a range, booleans, words, or a union of those."""

    integers: tuple[int, int] | None = None  # smallest and largest, both included
    booleans: bool = False
    words: tuple[str, ...] = ()

    def __contains__(self, value: object) -> bool:
        """Whether `value` is one of the knob's values; `True` and `1` are different values."""
        if isinstance(value, bool):
            return self.booleans
        if isinstance(value, int):
            return self.integers is not None and self.integers[0] <= value <= self.integers[1]
        return isinstance(value, str) and value in self.words

    def describe(self) -> str:
        """The values in words, for tables and messages: `an integer from 0 to 1024, or "autotune"`."""
        parts = ["true or false"] if self.booleans else []
        if self.integers is not None:
            parts.append(f"an integer from {self.integers[0]} to {self.integers[1]}")
        if self.words:
            parts.append(" or ".join(f'"{word}"' for word in self.words))
        return ", or ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """All that is known about one knob."""

    name: str  # as in TensorFlow or Keras
    summary: str  # one line for `autotune knobs`
    domain: Domain
    default: KnobValue | None  # TensorFlow's; None where only the workload can say
    stage: Stage
    set: Callable[[Any, Any], Any] = lambda target, value: target  # makes a value act on the stage's target
    read: Callable[[Any], KnobValue | None] = lambda target: None  # the value in force; None where nothing tells
    variable: str | None = None  # of the shell, that acts where nothing else is set
    devices: frozenset[Device] = frozenset(Device)
    capability: Mapping[KnobValue, float] = field(default_factory=dict)  # lowest of a GPU that has a value's fast path
    acts: Callable[[Mapping[str, KnobValue]], bool] = lambda configuration: True  # whether it does anything in it
    memory: Callable[[KnobValue], int | None] = lambda value: None  # ranks values by need; None: unknown
    numerics: Numerics = Numerics.SAME
    plain: KnobValue | None = None  # its value in the reference of the numerics check; None: the baseline's
    per_core: bool = False  # a number of threads: on a part of the cores it is the like part of them
    structural: bool = False  # changes what the pipeline is made of, and with it the cost between epochs
    probes: tuple[Probe, ...] = ()  # tried first; without any, two values are tried after all probes
    needs_dataset_config: bool = False  # reaches the pipeline only through `dataset(config)`
    of_workload: bool = False  # some workloads have it; the recipes of others lack it
