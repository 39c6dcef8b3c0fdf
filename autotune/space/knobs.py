"""Every knob there is, in one table. An entry holds all that is known about a knob.

To add a knob, add an entry to `_TABLE` (those of GPUs alone are in `gpu_knobs`), and a range to the search spaces that
are to vary it. No TensorFlow, Keras or Optuna may be imported here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from autotune.data.errors import ConfigurationError
from autotune.data.models import KnobValue as KnobValue
from autotune.data.models import Value as Value
from autotune.data.printable import short
from autotune.space import probes as early
from autotune.space.gpu_knobs import GPU_KNOBS, ON_GPU
from autotune.space.knob import AS_WRITTEN as AS_WRITTEN
from autotune.space.knob import Device as Device
from autotune.space.knob import Domain as Domain
from autotune.space.knob import Knob as Knob
from autotune.space.knob import Numerics as Numerics
from autotune.space.knob import Stage as Stage
from autotune.space.knob import alike
from autotune.space.probes import Probe, exactly, near, probe
from autotune.space.variables import own_variable


def _by_number(value: KnobValue) -> int | None:
    return value if type(value) is int else None


def _set_precision(tf: Any, policy: str) -> None:
    import keras

    keras.config.set_dtype_policy(policy)


def _read_precision(tf: Any) -> str:
    import keras

    return str(keras.config.dtype_policy().name)


def _op_threads(of: str, summary: str) -> Knob:
    """The number of threads of one of TensorFlow's two pools; 0 is TensorFlow's choice."""
    variable = f"TF_NUM_{of.upper()}OP_THREADS"

    def write(tf: Any, threads: int) -> None:
        os.environ.pop(variable, None)  # or it would act where 0 is wanted
        getattr(tf.config.threading, f"set_{of}_op_parallelism_threads")(threads)

    def read(tf: Any) -> int:
        text = os.environ.get(variable, "")
        set_ = int(getattr(tf.config.threading, f"get_{of}_op_parallelism_threads")())
        return set_ or (int(text) if text.isdecimal() else 0)

    return Knob(
        name=f"{of}_op_threads",
        summary=f"{summary}; 0 is TensorFlow's choice",
        domain=Domain(integers=(0, 4096)),
        default=0,
        stage=Stage.RUNTIME,
        set=write,
        read=read,
        variable=variable,
        memory=alike,
        per_core=True,
    )


def _prefetch(batches: Any, depth: int | str) -> Any:
    autotune = -1  # tf.data.AUTOTUNE
    if not depth or depth == AS_WRITTEN:
        return batches
    return batches.prefetch(autotune if depth == "autotune" else depth)


def _set_auto_shard(options: Any, policy: str) -> None:
    import tensorflow as tf

    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy.upper()]


def _option(path: str) -> Callable[[Any, Any], None]:
    """A setter of one of a dataset's options."""
    parent, _, last = path.rpartition(".")
    return lambda options, value: setattr(attrgetter(parent)(options) if parent else options, last, value)


_OF_SCRIPT: dict[str, Any] = {"default": None, "stage": Stage.PIPELINE, "structural": True, "of_workload": True}
_OF_STRATEGY: dict[str, Any] = {"stage": Stage.SCOPE, "of_workload": True}

_TABLE = (
    Knob(
        name="batch_size",
        summary="examples per step",
        domain=Domain(integers=(1, 1 << 20)),
        default=None,
        stage=Stage.PIPELINE,
        memory=_by_number,
        numerics=Numerics.EXAMPLES,
        probes=(*early.batch(4), *early.batch(2), probe(10, early.larger), probe(80, early.smaller)),
    ),
    Knob(
        name="global_batch",
        summary="examples per update of the weights: batches of batch_size are accumulated (--global-batch)",
        domain=Domain(integers=(1, 1 << 24)),
        default=None,
        stage=Stage.OPTIMIZER,
        numerics=Numerics.EXAMPLES,
        of_workload=True,
    ),
    Knob(
        name="precision",
        summary="Keras dtype policy: what the layers compute in",
        domain=Domain(words=("float32", "mixed_bfloat16", "mixed_float16")),
        default="float32",
        stage=Stage.BUILD,
        set=_set_precision,
        read=_read_precision,
        capability={"mixed_float16": 7.0, "mixed_bfloat16": 8.0},  # NVIDIA's tensor cores: Volta, Ampere
        memory=lambda policy: int(policy == "float32"),
        numerics=Numerics.ARITHMETIC,
        plain="float32",
        probes=(
            *(probe(60, exactly(f"mixed_{each}")) for each in ("bfloat16", "float16")),
            probe(60, exactly("float32")),
        ),
    ),
    Knob(
        name="tensor_float_32",
        summary="float32 matrix products on TensorFloat-32 units (NVIDIA Ampere and later)",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.RUNTIME,
        set=lambda tf, on: tf.config.experimental.enable_tensor_float_32_execution(on),
        read=lambda tf: tf.config.experimental.tensor_float_32_execution_enabled(),
        devices=ON_GPU,
        capability={True: 8.0, False: 8.0},
        memory=alike,
        numerics=Numerics.ARITHMETIC,
    ),
    Knob(
        name="jit_compile",
        summary='compile the train step with XLA; "auto" is Keras\'s own rule',
        domain=Domain(booleans=True, words=("auto",)),
        default="auto",
        stage=Stage.COMPILE,
        numerics=Numerics.ARITHMETIC,
        plain=False,
        probes=(probe(50, exactly(True)), probe(50, exactly(False))),
    ),
    Knob(
        name="steps_per_execution",
        summary="train steps per call into TensorFlow",
        domain=Domain(integers=(1, 4096)),
        default=1,
        stage=Stage.COMPILE,
        probes=(
            Probe(place=lambda now: 20 if now.short_steps else None, to=early.times(4)),
            probe(70, early.larger),
            probe(70, early.smaller),
        ),
    ),
    Knob(
        name="prefetch",
        summary="batches prepared ahead of the step; 0 is none",
        domain=Domain(integers=(0, 4096), words=("autotune", AS_WRITTEN)),
        default=0,
        stage=Stage.PIPELINE,
        set=_prefetch,
        memory=_by_number,
        structural=True,
        probes=(early.for_input(41, exactly(2)), early.for_input(42, exactly("autotune"))),
    ),
    Knob(
        name="num_parallel_calls",
        summary="parallel calls in the training's own map() and interleave(); 0 is serial",
        domain=Domain(integers=(0, 4096), words=("autotune", AS_WRITTEN)),
        default=0,
        stage=Stage.PIPELINE,
        memory=_by_number,
        structural=True,
        probes=(  # parallel calls need threads to run on
            early.for_input(40, near(16), data_threads=near(16)),
            early.for_input(43, exactly("autotune")),
        ),
        needs_dataset_config=True,
    ),
    Knob(
        name="data_threads",
        summary="threads of a private tf.data pool; 0 is TensorFlow's shared pool",
        domain=Domain(integers=(0, 4096)),
        default=0,
        stage=Stage.OPTIONS,
        set=_option("threading.private_threadpool_size"),
        read=attrgetter("threading.private_threadpool_size"),
        memory=lambda threads: _by_number(threads) or None,  # the shared pool is as wide as the machine
        per_core=True,
        structural=True,
        probes=(early.for_input(40, near(16), num_parallel_calls=near(16)),),
    ),
    Knob(
        name="deterministic",
        summary="tf.data keeps the order of the examples across parallel calls",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.OPTIONS,
        set=_option("deterministic"),
        read=attrgetter("deterministic"),
        memory=alike,
        numerics=Numerics.EXAMPLES,
    ),
    Knob(
        name="data_autotune",
        summary="tf.data tunes its own buffers and parallel calls; an epoch may end in a stall of that",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.OPTIONS,
        set=_option("autotune.enabled"),
        read=attrgetter("autotune.enabled"),
        structural=True,
        probes=(probe(65, exactly(False)), probe(65, exactly(True))),
    ),
    Knob(
        name="persistent_iterator",
        summary="one iterator for all epochs: the batches repeat, and steps_per_epoch ends an epoch",
        domain=Domain(booleans=True),
        default=False,
        stage=Stage.PIPELINE,
        structural=True,
        probes=(probe(30, exactly(True)),),
    ),
    Knob(
        name="cache",
        summary="keep in memory what a script's last map without chance has made (--allow-cache)",
        domain=Domain(booleans=True),
        memory=lambda on: int(bool(on)),
        probes=(early.for_input(39, exactly(True)),),
        **_OF_SCRIPT,
    ),
    Knob(
        name="workers",
        summary="threads or processes that make the batches of a script's PyDataset",
        domain=Domain(integers=(1, 4096)),
        memory=_by_number,
        probes=(early.for_input(40, near(16)),),
        **_OF_SCRIPT,
    ),
    Knob(
        name="use_multiprocessing",
        summary="processes, not threads, make the batches of a script's PyDataset",
        domain=Domain(booleans=True),
        probes=(early.for_input(44, exactly(True)),),
        **_OF_SCRIPT,
    ),
    Knob(
        name="max_queue_size",
        summary="batches that wait in the queue of a script's PyDataset",
        domain=Domain(integers=(1, 4096)),
        memory=_by_number,
        **_OF_SCRIPT,
    ),
    _op_threads("intra", "threads inside one operation"),
    _op_threads("inter", "operations run at the same time"),
    Knob(
        name="onednn",
        summary="oneDNN kernels on the CPU (TF_ENABLE_ONEDNN_OPTS)",
        domain=Domain(booleans=True),
        stage=Stage.IMPORT,
        devices=frozenset({Device.CPU}),
        numerics=Numerics.ARITHMETIC,
        **own_variable("TF_ENABLE_ONEDNN_OPTS", {False: "0", True: "1"}, True),
    ),
    *GPU_KNOBS,
    Knob(
        name="strategy",
        summary="tf.distribute strategy; the batch size is global: each replica takes its part of a batch",
        domain=Domain(words=("none", "one_device", "mirrored")),
        default="none",
        numerics=Numerics.ARITHMETIC,
        plain="none",
        probes=(probe(5, exactly("mirrored"), batch_size=early.times(2)), probe(6, exactly("mirrored"))),
        **_OF_STRATEGY,
    ),
    Knob(
        name="replicas",
        summary="devices that strategy=mirrored trains on; they must divide the batch size",
        domain=Domain(integers=(1, 64)),
        default=1,
        **_OF_STRATEGY,
    ),
    Knob(
        name="cross_device",
        summary="how strategy=mirrored sums gradients; auto is TensorFlow's choice, nccl needs GPUs",
        domain=Domain(words=("auto", "nccl", "hierarchical_copy", "reduce_to_one")),
        default="auto",
        **_OF_STRATEGY,
    ),
    Knob(
        name="auto_shard_policy",
        summary="how several workers share a dataset; a single worker, as of strategy=mirrored, has it whole",
        domain=Domain(words=("auto", "off", "data", "file")),
        default="auto",
        stage=Stage.OPTIONS,
        set=_set_auto_shard,
        of_workload=True,
    ),
    Knob(
        name="per_replica_buffer_size",
        summary="batches that wait on each device of strategy=mirrored",
        domain=Domain(integers=(1, 64)),
        default=1,
        memory=_by_number,
        **_OF_STRATEGY,
    ),
)

STRATEGY_KNOBS = ("strategy", "replicas", "cross_device", "auto_shard_policy", "per_replica_buffer_size")
"""They exist where a seat has several devices, in none but such searches and their recipes."""
KNOBS: dict[str, Knob] = {each.name: each for each in _TABLE}
"""Every knob by name, in the order in which tables show them."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'? ` when `known` holds a name close to `name`, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? " if close else ""


def check_value(name: str, value: object, *, where: str) -> KnobValue:
    """`value`. Raises ConfigurationError where the knob does not exist or cannot take it; `where` is for messages."""
    if name not in KNOBS:
        raise ConfigurationError(
            f"{where}: there is no knob called {short(name)}",
            hint=f"{nearest(str(name), KNOBS)}`autotune knobs` lists them all.",
        )
    domain = KNOBS[name].domain
    if value not in domain or not isinstance(value, (bool, int, str)):
        raise ConfigurationError(f"{where}: {name} cannot be {short(value)}", hint=f"It takes {domain.describe()}.")
    return value


def knobs_on(device: Device) -> tuple[Knob, ...]:
    """The knobs that exist on `device`, in table order."""
    return tuple(each for each in KNOBS.values() if device in each.devices)
