"""Find what limits a training, from what was measured of its steps. Pure."""

from __future__ import annotations

from autotune.data.figures import Bottleneck, Ceilings, Name, Profile
from autotune.data.models import Frozen

NOT_INSTALLED = "xprof is not installed: `pip install xprof` reads the files that are kept"
"""The reason of a profile that was taken and cannot be read."""
# As shares of a step, those of XProf's own `input_pipeline_analyzer`; the last is of launch and of communication.
INPUT_MODERATE, INPUT_HIGH = 0.05, 0.20
SHOWN_ERROR = 0.005
USELESS_ERROR = 0.5  # of a wait that is shorter
CEILING_RATIO = 1.25
"""So many times as fast as the step, a pipeline alone does not limit the training; they may still share cores."""
LAUNCH_HIGH = 0.15
UNUSED_HIGH = 0.4
"""Share of a profiled step that no operation uses: large ones leave up to a quarter unused, tiny ones half and more."""
LONGEST_START = 2e-3
"""Seconds that starting an operation takes at most. Longer times include work that the profile does not show."""
MAIN_SHARE = 0.5
_NOT_OPERATIONS = ("input", "communication", "launch")
MATRIX_WORK = ("MatMul", "Conv", "Einsum", "RNN", "LSTM", "GRU", "FFT", "Cholesky", "Attention", "Gemm", "Fusion")
"""Kinds of operations that compute much on each byte that they read."""
TENSOR_CORE_KERNELS = ("884", "1688", "16816", "tensorop", "hmma", "gmma")
"""Shapes and words of tensor cores in the names of CUDA's kernels; XProf 2.24 says of none that it uses them."""
MATRIX_KERNELS = (
    *TENSOR_CORE_KERNELS,
    *("gemm", "conv", "wgrad", "dgrad", "xmma", "cutlass", "nvjet", "attention", "fmha", "lstm", "gru"),
)
"""Words of such operations in those names, in lower case."""


class StepFigures(Frozen):
    """The figures of a trial's steps; None for those that were not measured."""

    waits: float | None = None  # share of a step that waits for input
    waits_error: float = 0.0  # half of the width of its interval
    ceilings: Ceilings | None = None
    outside: float | None = None  # share of a call's time outside of TensorFlow: in Keras, callbacks and the script
    profile: Profile | None = None
    gpu: float | None = None  # share of the time in which a kernel ran on the GPU
    gpu_memory: float | None = None  # share of it in which the GPU's memory was read or written


def find_bottleneck(seen: StepFigures) -> Bottleneck:
    """Return the limit of a trial, by the first of these rules that holds.

    | limit | rule |
    |---|---|
    | input | it is highly input-bound, the interval of its wait is above 5%, and its ceilings do not contradict |
    | communication | collectives take 15% of a profiled step |
    | launch | kernels are launched for 15% of a profiled step; or its operations leave 40% of it unused; or calls |
    | | spend 15% of their time outside TensorFlow; or no kernel runs on the GPU for 40% of the time |
    | unknown | the error of its wait is above half and above the wait itself |
    | balanced | it is moderately input-bound, or the interval of its wait leaves open whether it is highly so |
    | compute, memory_bandwidth | what XProf's roofline model says bounds most of the operations' time on a GPU; else, |
    | | half of their time is matrix work, or is not; without a profile, the GPU's memory is read or written for 60% |
    """
    profile = seen.profile if seen.profile is not None and seen.profile.steps else None
    if seen.waits is None and seen.outside is None and profile is None:
        return Bottleneck(name="unknown", why="neither its input wait nor its calls were measured")
    whole = 0.0 if profile is None else sum(profile.breakdown.values())
    waits, error, outside = seen.waits or 0.0, seen.waits_error, seen.outside or 0.0
    if profile is not None and whole > 0:  # a profile tells it step by step
        waits, error = profile.breakdown.get("input", 0.0) / whole, 0.0
    waiting = f"the step waits for input {waits:.0%} of its time"
    if error >= SHOWN_ERROR:
        waiting += f" (±{error:.0%})" if waits > error else f" (at most {min(1.0, waits + error):.0%})"
    by_input, by_compute = (seen.ceilings.by_input, seen.ceilings.by_compute) if seen.ceilings else (None, None)
    may_be_input = not by_input or not by_compute or by_input < CEILING_RATIO * by_compute
    if may_be_input and waits >= INPUT_HIGH and waits - error >= INPUT_MODERATE:
        return Bottleneck(name="input", share=waits, why=waiting)
    if profile is not None and (found := _by_profile(profile)) is not None:
        return found
    if profile is not None and _hides_operations(profile):
        profile = None
    if outside >= LAUNCH_HIGH:
        why = f"{outside:.0%} of a call passes outside of TensorFlow, in Keras, callbacks and Python"
        return Bottleneck(name="launch", share=outside, why=why)
    if may_be_input and error >= max(USELESS_ERROR, waits):
        return Bottleneck(name="unknown", why="input wait could not be measured")
    if may_be_input and (waits - error >= INPUT_MODERATE or waits + error >= INPUT_HIGH):
        return Bottleneck(name="balanced", share=waits, why=waiting)
    if profile is None and seen.gpu is not None and 1 - seen.gpu >= UNUSED_HIGH:
        why = f"the GPU runs a kernel for {seen.gpu:.0%} of the time, and the step waits for input {waits:.0%} of it"
        return Bottleneck(name="launch", share=1 - seen.gpu, why=why)
    if profile is None and seen.gpu_memory is not None and seen.gpu_memory >= MAIN_SHARE + 0.1:
        why = f"the GPU's memory is read or written for {seen.gpu_memory:.0%} of the time"
        return Bottleneck(name="memory_bandwidth", share=seen.gpu_memory, why=why)
    if profile is None:
        return Bottleneck(name="compute_or_memory", share=1 - waits, why=waiting)
    return _of_operations(profile)


def _hides_operations(profile: Profile) -> bool:
    """Return whether a step takes longer than its operations and their starts can, as XLA's programs on a CPU do."""
    seen, usual = profile.operation_seconds, profile.usual_operation_seconds
    if not seen or not usual or not profile.step_seconds:
        return False
    return profile.step_seconds - seen - sum(profile.breakdown.get(name, 0.0) for name in _NOT_OPERATIONS) > (
        LONGEST_START * seen / usual
    )


def _by_profile(profile: Profile) -> Bottleneck | None:
    """Return communication or launch, where a profile shows it."""
    step = profile.step_seconds or 0.0
    if step <= 0:
        return None
    talks, launches = (profile.breakdown.get(name, 0.0) / step for name in ("communication", "launch"))
    if talks >= LAUNCH_HIGH:
        return Bottleneck(name="communication", share=talks, why=f"collectives take {talks:.0%} of a step")
    if launches >= LAUNCH_HIGH:
        return Bottleneck(name="launch", share=launches, why=f"kernels are launched for {launches:.0%} of a step")
    usual, unused = profile.usual_operation_seconds, max(0.0, 1 - (profile.operation_seconds or 0.0) / step)
    if usual is not None and unused >= UNUSED_HIGH and not _hides_operations(profile):
        why = f"its operations, of {usual * 1e6:.0f} µs on average, leave {unused:.0%} of a step to starting them"
        return Bottleneck(name="launch", share=unused, why=why)
    return None


def _of_operations(profile: Profile) -> Bottleneck:
    """Return compute or memory bandwidth, by what the operations are."""
    share, slow = profile.matrix_share, profile.memory_bound_share
    if slow is not None and abs(slow - MAIN_SHARE) >= 0.1:
        limit: Name = "memory_bandwidth" if slow > MAIN_SHARE else "compute"
        bound, how = (slow, "memory bandwidth") if slow > MAIN_SHARE else (1 - slow, "compute")
        why = f"{how} bounds {bound:.0%} of the operations' time in the GPU's roofline model"
        return Bottleneck(name=limit, share=bound, why=why)
    if share is None:
        return Bottleneck(name="unknown", why="the profile holds no operations")
    if share >= MAIN_SHARE + 0.1:
        why = f"matrix products and convolutions are {share:.0%} of the operations' time"
        if profile.tensor_core_share:
            why += f", at least {profile.tensor_core_share:.0%} of it on tensor cores"
        return Bottleneck(name="compute", share=share, why=why)
    if share <= MAIN_SHARE - 0.1:
        why = f"element-wise operations, reductions and copies are {1 - share:.0%} of the operations' time"
        return Bottleneck(name="memory_bandwidth", share=1 - share, why=why)
    why = f"matrix work and element-wise operations share the time, {share:.0%} to {1 - share:.0%}"
    return Bottleneck(name="balanced", share=share, why=why)
