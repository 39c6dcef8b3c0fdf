"""Every knob there is, in one table. An entry holds all that is known about a knob.

To add a knob, add an entry to `_TABLE` or `GPU_KNOBS`, and a range to the search spaces that are to vary it.
TensorFlow and Keras are imported in setters and readers only.
"""

from __future__ import annotations

import difflib
import enum
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from autotune.data.errors import ConfigurationError
from autotune.data.models import KnobValue
from autotune.data.printable import short
from autotune.space import freed_memory
from autotune.space.changes import Change, Context, change, exactly, larger, near, smaller, times
from autotune.space.keras_in_use import keras_module
from autotune.space.variables import TF_XLA, XLA, variable_fields

AS_WRITTEN = "as_written"
"""Value of a knob whose call sites differ in the script: each call keeps its own."""
PRECISIONS = ("float64", "float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
"""Keras's dtype policies for floating-point numbers, from the highest precision to the lowest."""


class Stage(enum.StrEnum):
    """The stage at which a knob acts. All setters and readers of a stage take the same target."""

    IMPORT = "import"  # TensorFlow reads the environment. Target: the variables, as a dict
    START = "start"  # TensorFlow's runtime starts, and reads the environment. Target: the variables, as a dict
    RUNTIME = "runtime"  # the first tensor, dataset or model starts TensorFlow's runtime. Target: `tensorflow`
    BUILD = "build"  # layers are constructed. Target: the module `tensorflow`
    PIPELINE = "pipeline"  # the pipeline is built. Target: the dataset of batches; the setter returns a new one
    OPTIONS = "options"  # the pipeline gets its options. Target: a `tf.data.Options`
    SCOPE = "scope"  # the model is built and compiled, in the scope of a `tf.distribute` strategy. No setter
    COMPILE = "compile"  # the knob is an argument of `model.compile`. No setter
    OPTIMIZER = "optimizer"  # the model is compiled. No setter: see `apply.accumulate`


class Device(enum.StrEnum):
    """The kind of device that a training runs on."""

    CPU = "cpu"
    GPU = "gpu"


class Numerics(enum.StrEnum):
    """The effect of a knob on the numbers that a training computes."""

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
        """Return whether the knob can take `value`; `True` and `1` are different values."""
        if isinstance(value, bool):
            return self.booleans
        if isinstance(value, int):
            return self.integers is not None and self.integers[0] <= value <= self.integers[1]
        return isinstance(value, str) and value in self.words

    def describe(self) -> str:
        """Return the values in words, for tables and messages: `an integer from 0 to 1024, or "autotune"`."""
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
    read: Callable[[Any], KnobValue | None] = lambda target: None  # the value in force; None where it is unknown
    variable: str | None = None  # of the shell, that acts where nothing else is set
    devices: frozenset[Device] = frozenset(Device)
    capability: Mapping[KnobValue, float] = field(default_factory=dict)  # lowest of a GPU that has a value's fast path
    acts: Callable[[Mapping[str, KnobValue]], bool] = lambda configuration: True  # whether it does anything in it
    memory: Callable[[KnobValue], int | None] = lambda value: None  # ranks values by need; None: unknown
    numerics: Numerics = Numerics.SAME
    plain: KnobValue | None = None  # its value in the reference of the numerics check; None: the baseline's
    structural: bool = False  # changes what the pipeline is made of, and with it the cost between epochs
    changes: tuple[Change, ...] = ()  # worth a trial; without any, two of its other values are tried
    useful: Callable[[Context], bool] = lambda now: True  # whether it can act there: else it is changed last
    most: Callable[[Context], float] = lambda now: math.inf  # a larger number cannot act there
    units: Mapping[KnobValue, tuple[str, ...]] = field(default_factory=dict)  # that make a value fast, the best first
    needs_dataset_config: bool = False  # reaches the pipeline only through `dataset(config)`
    of_workload: bool = False  # some workloads or machines have it; the recipes of others lack it


_ON_GPU = frozenset({Device.GPU})
_OVERLAPPED: dict[str, Any] = {"useful": lambda now: now.waits_for_input and now.most_calls > 1}
_PARALLEL: dict[str, Any] = {**_OVERLAPPED, "most": attrgetter("most_calls")}
_ARITHMETIC: dict[str, Any] = {"numerics": Numerics.ARITHMETIC, "plain": False}
_OF_SCRIPT: dict[str, Any] = {"default": None, "stage": Stage.PIPELINE, "structural": True, "of_workload": True}
_OF_STRATEGY: dict[str, Any] = {"stage": Stage.SCOPE, "of_workload": True}


def _read_policy(tf: Any) -> str:
    policy = keras_module().mixed_precision.global_policy()
    computes_in = str(policy.compute_dtype)
    return computes_in if computes_in == policy.variable_dtype else f"mixed_{computes_in}"


def _same_memory(value: KnobValue) -> int:
    return 0


def _number(value: KnobValue) -> int | None:
    return value if type(value) is int else None


def _op_threads(pool: str, summary: str) -> Knob:
    """Return the knob of one of TensorFlow's two thread pools; 0 is TensorFlow's choice."""
    variable = f"TF_NUM_{pool.upper()}OP_THREADS"

    def write(tf: Any, threads: int) -> None:
        os.environ.pop(variable, None)  # or it would act where 0 is wanted
        getattr(tf.config.threading, f"set_{pool}_op_parallelism_threads")(threads)

    def read(tf: Any) -> int:
        text = os.environ.get(variable, "")
        threads = int(getattr(tf.config.threading, f"get_{pool}_op_parallelism_threads")())
        return threads or (int(text) if text.isdecimal() else 0)

    return Knob(
        name=f"{pool}_op_threads",
        summary=f"{summary}; 0 is TensorFlow's choice",
        domain=Domain(integers=(0, 4096)),
        default=0,
        stage=Stage.RUNTIME,
        set=write,
        read=read,
        variable=variable,
        memory=_same_memory,
        most=attrgetter("most_threads"),
    )


def _prefetch(batches: Any, depth: int | str) -> Any:
    autotune = -1  # tf.data.AUTOTUNE
    if not depth or depth == AS_WRITTEN:
        return batches
    return batches.prefetch(autotune if depth == "autotune" else depth)


def _prefetch_to_device(batches: Any, depth: int, device: str = "/GPU:0") -> Any:
    import tensorflow as tf

    return batches.apply(tf.data.experimental.prefetch_to_device(device, depth)) if depth else batches


def _set_auto_shard(options: Any, policy: str) -> None:
    import tensorflow as tf

    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy.upper()]


def _set_option(path: str) -> Callable[[Any, Any], None]:
    parent, _, last = path.rpartition(".")
    return lambda options, value: setattr(attrgetter(parent)(options) if parent else options, last, value)


def _gpu_variable(
    name: str, summary: str, variable: str, texts: dict[Any, str], default: KnobValue, *, flag: str = "", **more: Any
) -> Knob:
    """Return the knob of an environment variable, or of a flag in one; see `variable_fields`."""
    # Read when the runtime starts or XLA first compiles: after a template has forked.
    domain = Domain(words=tuple(texts))
    if isinstance(default, bool):
        domain = Domain(booleans=True)
    elif isinstance(default, int):
        domain = Domain(integers=(min(texts), max(texts)))
    fields = variable_fields(variable, texts, default, flag=flag)
    return Knob(name=name, summary=summary, domain=domain, stage=Stage.START, devices=_ON_GPU, **fields, **more)


def _xla_flag(name: str, summary: str, default: KnobValue, most: int = 0, **more: Any) -> Knob:
    """Return the knob of a flag in XLA_FLAGS that is true or false, or a number from 0 to `most`."""

    def acts(configuration: Mapping[str, KnobValue]) -> bool:
        return bool(configuration.get("jit_compile") or configuration.get("xla_auto_clustering"))

    texts: dict[Any, str] = {number: str(number) for number in range(most + 1)}
    texts = texts if most else {False: "false", True: "true"}
    return _gpu_variable(name, summary, XLA, texts, default, flag=name, acts=acts, **more)


def _grappler_pass(key: str, summary: str) -> Knob:
    """Return the knob of one of Grappler's passes, which are on by default. Grappler silently ignores unknown keys."""
    return Knob(
        name=key,
        summary=summary,
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.RUNTIME,
        set=lambda tf, on: tf.config.optimizer.set_experimental_options({key: on}),
        read=lambda tf: tf.config.optimizer.get_experimental_options().get(key, True),
        devices=_ON_GPU,
        numerics=Numerics.ARITHMETIC,
    )


GPU_KNOBS = (
    _gpu_variable(  # tensorflow/compiler/jit/flags.cc; a step that is compiled as a whole leaves nothing to cluster
        "xla_auto_clustering",
        "XLA compiles the clusters of operations that it finds (TF_XLA_FLAGS, tf_xla_auto_jit)",
        TF_XLA,
        {False: "0", True: "2"},
        False,
        flag="tf_xla_auto_jit",
        acts=lambda configuration: (
            not configuration.get("jit_compile") and configuration.get("graph_step") is not False
        ),
        changes=(change(exactly(True), jit_compile=exactly(False)),),
        **_ARITHMETIC,
    ),
    _gpu_variable(  # tensorflow/core/common_runtime/gpu/gpu_device.cc
        "gpu_thread_mode",
        "threads that launch kernels: the CPU's, one GPU's own, or all GPUs' (TF_GPU_THREAD_MODE)",
        "TF_GPU_THREAD_MODE",
        {mode: mode for mode in ("global", "gpu_private", "gpu_shared")},
        "global",
        memory=_same_memory,
        changes=(change(exactly("gpu_private")),),
    ),
    _gpu_variable(  # the same file
        "gpu_thread_count",
        "how many of those threads, where they are not the CPU's (TF_GPU_THREAD_COUNT)",
        "TF_GPU_THREAD_COUNT",
        {number: str(number) for number in range(1, 65)},
        2,
        memory=_same_memory,
        acts=lambda configuration: configuration.get("gpu_thread_mode") != "global",
    ),
    _gpu_variable(  # tensorflow/core/kernels/matmul_op_impl.h, tensorflow/core/grappler/optimizers/remapper.cc
        "cublaslt",
        "matrix products by cuBLASLt, with bias and activation fused (TF_USE_CUBLASLT)",
        "TF_USE_CUBLASLT",
        {False: "0", True: "1"},
        False,
        changes=(change(exactly(True)),),
        **_ARITHMETIC,
    ),
    _xla_flag(  # xla/debug_options_flags.cc, as for all flags of XLA
        "xla_gpu_graph_min_graph_size",
        "fewest kernels that XLA launches as one CUDA graph",
        5,
        most=1024,
        changes=(change(exactly(1), jit_compile=exactly(True)),),
    ),
    # Keras copies each batch inside the step (keras/src/backend/tensorflow/trainer.py, TFEpochIterator). The copying
    # part must be a pipeline's last, and hides its length: an epoch then ends in a step that fails half-way.
    Knob(
        name="prefetch_to_device",
        summary="batches copied to the GPU ahead of the step, with persistent_iterator; 0 is none",
        domain=Domain(integers=(0, 64)),
        default=0,
        stage=Stage.PIPELINE,
        set=_prefetch_to_device,
        devices=_ON_GPU,
        memory=_number,
        structural=True,
        acts=lambda configuration: (
            bool(configuration.get("persistent_iterator")) and configuration.get("strategy", "none") == "none"
        ),  # a strategy copies the batches itself
        changes=(change(exactly(2), persistent_iterator=exactly(True)),),
    ),
    _xla_flag("xla_gpu_enable_cublaslt", "XLA's matrix products by cuBLASLt", False, **_ARITHMETIC),
    _xla_flag("xla_gpu_enable_cudnn_layer_norm", "XLA's layer normalisation by cuDNN", False, **_ARITHMETIC),
    _xla_flag(
        "xla_gpu_cudnn_gemm_fusion_level",
        "how much XLA fuses into cuDNN's matrix products; 0 is nothing",
        0,
        most=3,
        numerics=Numerics.ARITHMETIC,
        plain=0,
    ),
    _xla_flag("xla_gpu_exhaustive_tiling_search", "XLA tries all tilings of its matrix products", False, **_ARITHMETIC),
    _grappler_pass("layout_optimizer", "Grappler chooses the layout of images in memory"),
    _grappler_pass("remapping", "Grappler fuses operations into one kernel"),
    _gpu_variable(  # tensorflow/core/common_runtime/gpu/gpu_process_state.cc; an empty text is TensorFlow's default
        "gpu_allocator",
        "who hands out the GPU's memory: TensorFlow (bfc) or CUDA (TF_GPU_ALLOCATOR)",
        "TF_GPU_ALLOCATOR",
        {"bfc": "", "cuda_malloc_async": "cuda_malloc_async"},
        "bfc",
    ),
)
"""The knobs that exist on an NVIDIA GPU alone, but `tensor_float_32`, in the order in which tables show them."""

_TABLE = (
    Knob(
        name="batch_size",
        summary="examples per step",
        domain=Domain(integers=(1, 1 << 20)),
        default=None,
        stage=Stage.PIPELINE,
        memory=_number,
        numerics=Numerics.EXAMPLES,
        changes=(change(times(4)), change(larger)),
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
        domain=Domain(words=PRECISIONS),
        default="float32",
        stage=Stage.BUILD,
        set=lambda tf, policy: keras_module().mixed_precision.set_global_policy(policy),
        read=_read_policy,
        capability={"mixed_float16": 7.0, "mixed_bfloat16": 8.0},  # NVIDIA's tensor cores: Volta, Ampere
        memory=lambda policy: {"float64": 2, "float32": 1}.get(str(policy), 0),
        numerics=Numerics.ARITHMETIC,
        plain="float32",
        acts=lambda configuration: configuration.get("graph_step") is not False,  # an eager step waits for Python
        changes=tuple(change(exactly(policy)) for policy in ("mixed_bfloat16", "mixed_float16", "float32")),
        units={
            **dict.fromkeys(("mixed_bfloat16", "bfloat16"), ("amx_bf16", "avx512_bf16", "tensor_bf16")),
            **dict.fromkeys(("mixed_float16", "float16"), ("amx_fp16", "tensor_fp16")),
        },
    ),
    Knob(
        name="tensor_float_32",
        summary="float32 matrix products on TensorFloat-32 units (NVIDIA Ampere and later)",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.RUNTIME,
        set=lambda tf, on: tf.config.experimental.enable_tensor_float_32_execution(on),
        read=lambda tf: tf.config.experimental.tensor_float_32_execution_enabled(),
        devices=_ON_GPU,
        capability={True: 8.0, False: 8.0},
        memory=_same_memory,
        numerics=Numerics.ARITHMETIC,
    ),
    Knob(
        name="jit_compile",
        summary='compile the train step with XLA; "auto" is Keras 3\'s own rule, and none in Keras 2',
        domain=Domain(booleans=True, words=("auto",)),
        default="auto",
        stage=Stage.COMPILE,
        numerics=Numerics.ARITHMETIC,
        plain=False,
        changes=(change(exactly(True), graph_step=exactly(True)), change(exactly(False))),
        acts=lambda configuration: configuration.get("graph_step") is not False,
    ),
    Knob(
        name="graph_step",
        summary="tf.function compiles the eager step of a script's own loop",
        domain=Domain(booleans=True),
        memory=_same_memory,
        changes=(change(exactly(True)),),
        **{**_OF_SCRIPT, "structural": False},
    ),
    Knob(
        name="steps_per_execution",
        summary="train steps per call into TensorFlow",
        domain=Domain(integers=(1, 4096)),
        default=1,
        stage=Stage.COMPILE,
        changes=(change(near(8)), change(times(4)), change(larger), change(smaller)),
        acts=lambda configuration: configuration.get("graph_step") is not False,
        useful=attrgetter("short_steps"),
    ),
    Knob(
        name="prefetch",
        summary="batches prepared ahead of the step; 0 is none",
        domain=Domain(integers=(0, 4096), words=("autotune", AS_WRITTEN)),
        default=0,
        stage=Stage.PIPELINE,
        set=_prefetch,
        memory=_number,
        structural=True,
        changes=(change(exactly(2)), change(exactly("autotune"))),
        **_OVERLAPPED,
    ),
    Knob(
        name="num_parallel_calls",
        summary="parallel calls in the training's own map() and interleave(); 0 is serial",
        domain=Domain(integers=(0, 4096), words=("autotune", AS_WRITTEN)),
        default=0,
        stage=Stage.PIPELINE,
        memory=_number,
        structural=True,
        changes=(change(near(16), data_threads=near(16)), change(exactly("autotune"))),  # calls need threads to run on
        **_PARALLEL,
        needs_dataset_config=True,
    ),
    Knob(
        name="data_threads",
        summary="threads of a private tf.data pool; 0 is TensorFlow's shared pool",
        domain=Domain(integers=(0, 4096)),
        default=0,
        stage=Stage.OPTIONS,
        set=_set_option("threading.private_threadpool_size"),
        read=attrgetter("threading.private_threadpool_size"),
        memory=lambda threads: _number(threads) or None,  # the shared pool is as wide as the machine
        structural=True,
        changes=(change(near(16), num_parallel_calls=near(16)),),
        **_PARALLEL,
    ),
    Knob(
        name="deterministic",
        summary="tf.data keeps the order of the examples across parallel calls",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.OPTIONS,
        set=_set_option("deterministic"),
        read=attrgetter("deterministic"),
        memory=_same_memory,
        numerics=Numerics.EXAMPLES,
        **_OVERLAPPED,
    ),
    Knob(
        name="data_autotune",
        summary="tf.data tunes its own buffers and parallel calls; an epoch may end in a stall of that",
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.OPTIONS,
        set=_set_option("autotune.enabled"),
        read=attrgetter("autotune.enabled"),
        structural=True,
        changes=(change(exactly(False)), change(exactly(True))),
        useful=lambda now: now.waits_for_input or now.short_epochs,
    ),
    Knob(
        name="persistent_iterator",
        summary="one iterator for all epochs: the batches repeat, and steps_per_epoch ends an epoch",
        domain=Domain(booleans=True),
        default=False,
        stage=Stage.PIPELINE,
        structural=True,
        changes=(change(exactly(True)),),
        useful=attrgetter("short_epochs"),
    ),
    Knob(
        name="cache",
        summary="keep what the last deterministic map or flat_map returns, in memory or in a file of each process",
        domain=Domain(booleans=True),
        memory=lambda on: int(bool(on)),
        changes=(change(exactly(True)),),
        useful=lambda now: now.waits_for_input or now.may_wait or now.short_epochs,  # which fill a shuffle buffer
        **_OF_SCRIPT,
    ),
    Knob(
        name="batched_map",
        summary="a script's last map before batch() maps whole batches, proven to give the same elements",
        domain=Domain(booleans=True),
        acts=lambda configuration: not configuration.get("cache"),  # which keeps single examples
        changes=(change(exactly(True)),),
        useful=lambda now: now.waits_for_input or now.may_wait,  # calls for single examples take much of short steps
        **_OF_SCRIPT,
    ),
    Knob(
        name="workers",
        summary="threads or processes that make the batches of a script's PyDataset",
        domain=Domain(integers=(1, 4096)),
        memory=_number,
        changes=(change(near(16)),),
        **_PARALLEL,
        **_OF_SCRIPT,
    ),
    Knob(
        name="use_multiprocessing",
        summary="processes, not threads, make the batches of a script's PyDataset",
        domain=Domain(booleans=True),
        changes=(change(exactly(True)),),
        **_OVERLAPPED,
        **_OF_SCRIPT,
    ),
    Knob(
        name="max_queue_size",
        summary="batches that wait in the queue of a script's PyDataset",
        domain=Domain(integers=(1, 4096)),
        memory=_number,
        **_OVERLAPPED,
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
        **variable_fields("TF_ENABLE_ONEDNN_OPTS", {False: "0", True: "1"}, True),
    ),
    Knob(
        name="keep_freed_memory",
        summary="glibc keeps freed memory for the next step (mallopt); one_arena: in one heap, also above 64 MiB",
        domain=Domain(words=tuple(freed_memory.MALLOPT)),
        default="none",
        stage=Stage.RUNTIME,
        set=freed_memory.keep,
        read=lambda tf: freed_memory.in_force,
        devices=frozenset({Device.CPU}),
        memory=lambda value: int(value != "none"),
        changes=(change(exactly("thresholds")), change(exactly("one_arena"))),
        useful=attrgetter("faults_often"),
        of_workload=True,
    ),
    *GPU_KNOBS,
    Knob(
        name="strategy",
        summary="tf.distribute strategy; the batch size is global: each replica takes its part of a batch",
        domain=Domain(words=("none", "one_device", "mirrored")),
        default="none",
        numerics=Numerics.ARITHMETIC,
        plain="none",
        changes=(change(exactly("mirrored"), batch_size=times(2)), change(exactly("mirrored"))),
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
        memory=_number,
        **_OVERLAPPED,
        **_OF_STRATEGY,
    ),
)

PRECISION_KNOBS = ("precision", "tensor_float_32")
"""They stay as a script or workload sets them, unless the user allows another precision."""
ALLOW_PRECISION = "--allow-precision varies it"
STRATEGY_KNOBS = ("strategy", "replicas", "cross_device", "auto_shard_policy", "per_replica_buffer_size")
"""They exist only where a seat has several devices, and in the recipes of such searches."""
KNOBS: dict[str, Knob] = {knob.name: knob for knob in _TABLE}
"""Every knob by name, in the order in which tables show them."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean 'x'? ` where `known` holds a name close to `name`, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? " if close else ""


def check_value(name: str, value: object, *, where: str) -> KnobValue:
    """Return `value`. Raises ConfigurationError where the knob does not exist or cannot take it."""
    if name not in KNOBS:
        raise ConfigurationError(
            f"{where}: there is no knob called {short(name)}",
            hint=f"{did_you_mean(str(name), KNOBS)}`autotune knobs` lists them all.",
        )
    domain = KNOBS[name].domain
    if value not in domain or not isinstance(value, (bool, int, str)):
        raise ConfigurationError(f"{where}: {name} cannot be {short(value)}", hint=f"It takes {domain.describe()}.")
    return value


def knobs_on(device: Device) -> tuple[Knob, ...]:
    """Return the knobs that exist on `device`, in table order."""
    return tuple(knob for knob in KNOBS.values() if device in knob.devices)
