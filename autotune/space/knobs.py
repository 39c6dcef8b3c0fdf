"""Every knob there is, in one table.

A knob is one setting that changes the speed of a training. To add one: an entry in `KNOBS` here, and
the line in `autotune/recipe/apply.py` that sets it. Nothing else needs to know it.

This module may not import TensorFlow or Optuna.
"""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass

from pydantic import StrictBool, StrictInt, StrictStr

from autotune.errors import ConfigurationError
from autotune.printable import short

KnobValue = bool | int | str
"""What a knob can be set to. `bool`, `int` and `str` are kept apart: `True` is never `1`."""

Value = StrictBool | StrictInt | StrictStr
"""The same in the models of files and messages, where pydantic would otherwise turn one into another."""


class Stage(enum.StrEnum):
    """When a knob acts, in the order in which a training passes the stages."""

    IMPORT = "import"
    """An environment variable that TensorFlow reads while it is imported."""
    RUNTIME = "runtime"
    """Fixed once TensorFlow's runtime has started (the first tensor, dataset or model)."""
    BUILD = "build"
    """Read while layers are constructed."""
    COMPILE = "compile"
    """An argument of `model.compile`."""
    PIPELINE = "pipeline"
    """A property of the `tf.data` pipeline."""


class Device(enum.StrEnum):
    """What a training runs on."""

    CPU = "cpu"
    GPU = "gpu"


EVERYWHERE = frozenset(Device)


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The values a knob can take: integers in a range, booleans, words, or a union of those.

    Args:
        integers: Smallest and largest integer, both included, or None for no integers.
        booleans: Whether `True` and `False` are values.
        words: The strings that are values.
    """

    integers: tuple[int, int] | None = None
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
        parts = []
        if self.booleans:
            parts.append("true or false")
        if self.integers is not None:
            parts.append(f"an integer from {self.integers[0]} to {self.integers[1]}")
        if self.words:
            parts.append(" or ".join(f'"{word}"' for word in self.words))
        return ", or ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """All that is known about one knob.

    Args:
        name: What TensorFlow or Keras calls it.
        summary: One line for `autotune knobs`.
        domain: The values it can take.
        default: What TensorFlow does when nobody says; None where only the workload can say.
        stage: When it acts.
        changes_numerics: Whether a value other than the default can change what is computed.
        devices: Where it exists.
        hungrier_upwards: Whether a larger value needs more memory, all else equal.
        needs_dataset_config: Whether it reaches the pipeline only through `dataset(config)`.
    """

    name: str
    summary: str
    domain: Domain
    default: KnobValue | None
    stage: Stage
    changes_numerics: bool = False
    devices: frozenset[Device] = EVERYWHERE
    hungrier_upwards: bool = False
    needs_dataset_config: bool = False


_TABLE = (
    Knob(
        name="batch_size",
        summary="examples per step",
        domain=Domain(integers=(1, 1 << 20)),
        default=None,
        stage=Stage.PIPELINE,
        changes_numerics=True,
        hungrier_upwards=True,
    ),
    Knob(
        name="precision",
        summary="Keras dtype policy: what the layers compute in",
        domain=Domain(words=("float32", "mixed_bfloat16", "mixed_float16")),
        default="float32",
        stage=Stage.BUILD,
        changes_numerics=True,
    ),
    Knob(
        name="tensor_float_32",
        summary="float32 matrix products on TensorFloat-32 units (NVIDIA Ampere and later)",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.RUNTIME,
        changes_numerics=True,
        devices=frozenset({Device.GPU}),
    ),
    Knob(
        name="jit_compile",
        summary='compile the train step with XLA; "auto" is Keras\'s own rule',
        domain=Domain(booleans=True, words=("auto",)),
        default="auto",
        stage=Stage.COMPILE,
        changes_numerics=True,
    ),
    Knob(
        name="steps_per_execution",
        summary="train steps per call into TensorFlow",
        domain=Domain(integers=(1, 4096)),
        default=1,
        stage=Stage.COMPILE,
    ),
    Knob(
        name="prefetch",
        summary="batches prepared ahead of the step; 0 is none",
        domain=Domain(integers=(0, 4096), words=("autotune",)),
        default=0,
        stage=Stage.PIPELINE,
        hungrier_upwards=True,
    ),
    Knob(
        name="num_parallel_calls",
        summary="parallel calls in the workload's own map(); 0 is serial",
        domain=Domain(integers=(0, 4096), words=("autotune",)),
        default=0,
        stage=Stage.PIPELINE,
        hungrier_upwards=True,
        needs_dataset_config=True,
    ),
    Knob(
        name="data_threads",
        summary="threads of a private tf.data pool; 0 is TensorFlow's shared pool",
        domain=Domain(integers=(0, 4096)),
        default=0,
        stage=Stage.PIPELINE,
        hungrier_upwards=True,
    ),
    Knob(
        name="deterministic",
        summary="tf.data keeps the order of the examples across parallel calls",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.PIPELINE,
        changes_numerics=True,
    ),
    Knob(
        name="data_autotune",
        summary="tf.data tunes its own buffers and parallel calls; an epoch may end in a stall of that",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.PIPELINE,
    ),
    Knob(
        name="persistent_iterator",
        summary="one iterator for all epochs: the batches repeat, and steps_per_epoch ends an epoch",
        domain=Domain(booleans=True),
        default=False,
        stage=Stage.PIPELINE,
    ),
    Knob(
        name="intra_op_threads",
        summary="threads inside one operation; 0 is TensorFlow's choice",
        domain=Domain(integers=(0, 4096)),
        default=0,
        stage=Stage.RUNTIME,
    ),
    Knob(
        name="inter_op_threads",
        summary="operations run at the same time; 0 is TensorFlow's choice",
        domain=Domain(integers=(0, 4096)),
        default=0,
        stage=Stage.RUNTIME,
    ),
    Knob(
        name="onednn",
        summary="oneDNN kernels on the CPU (TF_ENABLE_ONEDNN_OPTS)",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.IMPORT,
        changes_numerics=True,
        devices=frozenset({Device.CPU}),
    ),
)

KNOBS: dict[str, Knob] = {knob.name: knob for knob in _TABLE}
"""Every knob by name, in the order in which tables show them."""


def knob(name: str, *, where: str) -> Knob:
    """The knob called `name`.

    Args:
        name: A knob's name.
        where: Where the name stands, for the message: a file and key, an argument.

    Raises:
        ConfigurationError: There is no such knob; the nearest right name is offered.
    """
    found = KNOBS.get(name)
    if found is None:
        raise ConfigurationError(
            f"{where}: there is no knob called {short(name)}",
            hint=f"{nearest(str(name), KNOBS)}`autotune knobs` lists them all.",
        )
    return found


def nearest(name: str, known: dict[str, object] | dict[str, Knob] | tuple[str, ...]) -> str:
    """`Did you mean 'x'? ` when `known` holds a name close to `name`, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? " if close else ""


def check_value(name: str, value: object, *, where: str) -> KnobValue:
    """`value`, if the knob `name` can take it.

    Raises:
        ConfigurationError: The knob does not exist, or cannot take the value.
    """
    domain = knob(name, where=where).domain
    if value not in domain or not isinstance(value, (bool, int, str)):
        raise ConfigurationError(
            f"{where}: {name} cannot be {short(value)}",
            hint=f"It takes {domain.describe()}.",
        )
    return value


def knobs_on(device: Device) -> tuple[Knob, ...]:
    """The knobs that exist on `device`, in table order."""
    return tuple(each for each in KNOBS.values() if device in each.devices)
