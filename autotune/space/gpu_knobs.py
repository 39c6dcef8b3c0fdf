"""Entries of the table of knobs that exist on an NVIDIA GPU alone. See `knobs`.

The variables are read when the runtime starts or XLA first compiles, after a template has forked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.data.models import KnobValue
from autotune.space import probes as early
from autotune.space.knob import Device, Domain, Knob, Numerics, Stage, alike
from autotune.space.probes import exactly, probe
from autotune.space.variables import TF_XLA, XLA, own_variable

ON_GPU = frozenset({Device.GPU})
_SWITCH = {False: "false", True: "true"}


def _with_xla(configuration: Mapping[str, KnobValue]) -> bool:
    return bool(configuration.get("jit_compile") or configuration.get("xla_auto_clustering"))


def _variable(
    name: str, summary: str, variable: str, texts: dict[Any, str], default: KnobValue, *, flag: str = "", **more: Any
) -> Knob:
    """A variable of the environment, or a flag in one; `texts` has what stands there for each value."""
    domain = Domain(words=tuple(texts))
    if isinstance(default, bool):
        domain = Domain(booleans=True)
    elif isinstance(default, int):
        domain = Domain(integers=(min(texts), max(texts)))
    own = own_variable(variable, texts, default, flag=flag)
    return Knob(name=name, summary=summary, domain=domain, stage=Stage.START, devices=ON_GPU, **own, **more)


def _xla_flag(name: str, summary: str, default: KnobValue, most: int = 0, **more: Any) -> Knob:
    """A flag in XLA_FLAGS that is true or false, or a number from 0 to `most`."""
    texts = {number: str(number) for number in range(most + 1)} if most else _SWITCH
    return _variable(name, summary, XLA, texts, default, flag=name, acts=_with_xla, **more)


def _grappler(key: str, summary: str) -> Knob:
    """One of Grappler's passes, which are on by default. Other keys are ignored without a word."""
    return Knob(
        name=key,
        summary=summary,
        domain=Domain(booleans=True),
        default=True,
        stage=Stage.RUNTIME,
        set=lambda tf, on: tf.config.optimizer.set_experimental_options({key: on}),
        read=lambda tf: tf.config.optimizer.get_experimental_options().get(key, True),
        devices=ON_GPU,
        numerics=Numerics.ARITHMETIC,
    )


def _prefetch_to_device(batches: Any, depth: int, device: str = "/GPU:0") -> Any:
    import tensorflow as tf

    return batches.apply(tf.data.experimental.prefetch_to_device(device, depth)) if depth else batches


_beside_jit: dict[str, Callable[..., Any]] = {"jit_compile": exactly(True)}
_ARITHMETIC: dict[str, Any] = {"numerics": Numerics.ARITHMETIC, "plain": False}

GPU_KNOBS = (
    _variable(  # tensorflow/compiler/jit/flags.cc; a step that is compiled as a whole leaves nothing to cluster
        "xla_auto_clustering",
        "XLA compiles the clusters of operations that it finds (TF_XLA_FLAGS, tf_xla_auto_jit)",
        TF_XLA,
        {False: "0", True: "2"},
        False,
        flag="tf_xla_auto_jit",
        acts=lambda configuration: not configuration.get("jit_compile"),
        probes=(early.Probe(place=lambda now: 52, to=exactly(True), together={"jit_compile": exactly(False)}),),
        **_ARITHMETIC,
    ),
    _variable(  # tensorflow/core/common_runtime/gpu/gpu_device.cc
        "gpu_thread_mode",
        "threads that launch kernels: the CPU's, one GPU's own, or all GPUs' (TF_GPU_THREAD_MODE)",
        "TF_GPU_THREAD_MODE",
        {each: each for each in ("global", "gpu_private", "gpu_shared")},
        "global",
        memory=alike,
        probes=(probe(62, exactly("gpu_private")),),
    ),
    _variable(  # the same file
        "gpu_thread_count",
        "how many of those threads, where they are not the CPU's (TF_GPU_THREAD_COUNT)",
        "TF_GPU_THREAD_COUNT",
        {number: str(number) for number in range(1, 65)},
        2,
        memory=alike,
        acts=lambda configuration: configuration.get("gpu_thread_mode") != "global",
    ),
    _variable(  # tensorflow/core/kernels/matmul_op_impl.h, tensorflow/core/grappler/optimizers/remapper.cc
        "cublaslt",
        "matrix products by cuBLASLt, with bias and activation fused (TF_USE_CUBLASLT)",
        "TF_USE_CUBLASLT",
        {False: "0", True: "1"},
        False,
        probes=(probe(64, exactly(True)),),
        **_ARITHMETIC,
    ),
    _xla_flag(  # xla/debug_options_flags.cc, as for all flags of XLA
        "xla_gpu_graph_min_graph_size",
        "fewest kernels that XLA launches as one CUDA graph",
        5,
        most=1024,
        probes=(early.Probe(place=lambda now: 66, to=exactly(1), together=_beside_jit),),
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
        devices=ON_GPU,
        memory=lambda depth: depth if type(depth) is int else None,
        structural=True,
        acts=lambda configuration: (
            bool(configuration.get("persistent_iterator")) and configuration.get("strategy", "none") == "none"
        ),  # a strategy copies the batches itself
        probes=(early.for_input(45, exactly(2), persistent_iterator=exactly(True)),),
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
    _grappler("layout_optimizer", "Grappler chooses the layout of images in memory"),
    _grappler("remapping", "Grappler fuses operations into one kernel"),
    _variable(  # tensorflow/core/common_runtime/gpu/gpu_process_state.cc; an empty text is TensorFlow's default
        "gpu_allocator",
        "who hands out the GPU's memory: TensorFlow (bfc) or CUDA (TF_GPU_ALLOCATOR)",
        "TF_GPU_ALLOCATOR",
        {"bfc": "", "cuda_malloc_async": "cuda_malloc_async"},
        "bfc",
    ),
)
"""In the order in which tables show them."""
