"""Facts about a script or workload: how it trains, what it sets by itself, and where a knob reaches it."""

from __future__ import annotations

import enum
import hashlib
import json
import os
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from autotune.data.models import Amount, Count, Frozen, Many, Value
from autotune.data.printable import plural, recorded_variables

NO_XLA = "XLA under a tf.distribute strategy fails or hangs (keras#18145, #17187, #21366)"
GPU_MODES = ("ecc", "persistence", "mig")
MEMORY_TOLERANCE = 0.1  # the share by which memory of the same size may differ


class KerasVersion(enum.StrEnum):
    """The Keras that a training uses: its package and its major version."""

    KERAS_3 = "keras 3"
    KERAS_2 = "tf_keras 2"

    @property
    def package(self) -> str:
        """The package that a script imports."""
        return self.value.partition(" ")[0]

    @property
    def label(self) -> str:
        """Its name in sentences."""
        return "Keras 3" if self is KerasVersion.KERAS_3 else "Keras 2 (tf_keras)"


class Trains(enum.StrEnum):
    """The kind of training loop in a script."""

    FIT = "fit"  # by `model.fit`
    LOOP = "loop"  # by a custom training loop


class Site(Frozen):
    """A call in the user's code."""

    file: str  # from the script's directory, or absolute outside of it; of a notebook with the cell
    function: str  # qualified name of the function that it stands in; `<module>` outside of any
    call: str  # name of the called function: `batch`
    order: int  # among the calls of that name in that function, from 0
    line: int  # when it was found; it may have moved since
    cell: str = ""  # of a notebook: a digest of the cell's code, and its count among equal cells

    def __str__(self) -> str:
        """Return the text for a user: `batch() in train.py, line 12`."""
        return f"{self.call}() in {self.file}, line {self.line}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The parts of the call site that stay the same when lines move."""
        return self.cell or self.file, self.function, self.call, self.order


class Fit(Frozen):
    """A call of `model.fit`."""

    line: str  # `train.py, line 30`
    site: Site | None = None
    planned_seconds: FiniteFloat  # epochs × steps × what a step took; 0 where there is only one `fit`


class SlowPart(Frozen):
    """A part of a script that is slow as it is written."""

    what: str  # with its line: `map() in train.py, line 18 runs serially`
    limit: Literal["input", "launch", "memory_bandwidth"]  # of the training, that it makes
    knob: str = ""  # that changes it; empty where only an edit does


class ScriptFacts(Frozen):
    """Facts that running a script once, up to its training, has shown."""

    trains: Trains
    fit: int = 1  # which `fit` is tuned, from 1
    fit_site: Site | None = None  # where it stands: the recipe acts at each execution of it
    fit_calls: Count = 1  # how often the survey saw it called there; more than once where a loop calls it
    compile_site: Site | None = None  # where its model was compiled
    fits: Many[Fit] = ()  # in the order in which the script calls them
    baseline: dict[str, Value]  # the knobs as the script leaves them
    sites: dict[str, Many[Site]] = Field({})  # where a knob reaches the script's own calls
    not_reached: dict[str, str] = Field({})  # knobs that do not reach it, with the reason and the next step
    slow_parts: Many[SlowPart] = ()  # of what makes batches and of the step, the worst first of each
    left_out: Many[str] = ()  # what trials leave out: callbacks and saves that write
    writing_seconds: Amount | None = Field(
        None, le=1e9
    )  # that those callbacks take at the end of an epoch; None if not measured
    before_seconds: FiniteFloat = 0.0  # what each trial of the script does before it trains
    shared_seconds: Amount = 0.0  # what the script does before TensorFlow's runtime starts, if once for all trials
    repeats_start: str = ""  # why each trial does that by itself; empty where that takes no time
    redraws: str = ""  # the line from which a compiled step draws other random numbers of the script's seed
    vectorized: bool = False  # `batched_map` is by `tf.vectorized_map`: the script's function takes no batches
    epochs: int | None = None  # of the training, as the script asks for them
    ends_early: str = ""  # what may end the tuned `fit` before its last epoch, with its line; empty for nothing
    schedule: str | None = None  # the optimizer's learning-rate schedule, which counts steps
    batch_notes: Many[str] = ()  # what else a larger batch size changes, in words; empty where it is not varied
    variables: dict[str, str] = Field({})  # of the environment, that the script sets before it imports TensorFlow
    batch_given_as: str = ""  # where the batch size comes from, in words
    step_function: Site | None = None  # of a loop: the function that XLA is asked to compile
    workers: Count = 0  # processes on this host that TF_CONFIG names for a strategy of several; 0 without
    work_varies: bool = False  # of a loop: the work per update of the weights varies, as after episodes
    updaters: Count = 1  # of a loop that reads no dataset: optimizers that take turns, and all update in each step
    tunes_steps: bool = False  # Keras tunes its steps per execution; the baseline has those on which it settled
    cache_file_bytes: Count = 0  # of an epoch that the knob cache keeps in a file; 0 where memory has room
    epochs_range: Site | None = None  # of a loop: the `range()` of its epochs, which is infinite in trials
    skip_cells: str | None = None  # tags of cells of a notebook that are left out, with commas between

    @property
    def unit(self) -> str:
        """The unit of its speed: updates if the examples of an update are unknown, else samples."""
        return "updates" if self.work_varies else "samples"

    def total_seconds(self, samples: int, rate: float, examples: int | None) -> float:
        """Return the seconds of a training, with its writers'. `examples`: of an epoch, None where there are none."""
        return samples / rate + (samples / examples * (self.writing_seconds or 0.0) if examples else 0.0)

    @property
    def recorded(self) -> ScriptFacts:
        """The facts as written to files: without values of variables that may be secrets."""
        return self.model_copy(update={"variables": recorded_variables(self.variables)})


class ScriptSettings(Frozen):
    """The user's settings for a script, beyond its arguments."""

    fit: int | None = None  # which `fit` is tuned, from 1; None for the longest
    allow_writes: bool = False  # trials may write to files that exist
    allow_precision: bool = False  # the precision may vary where the script chooses it
    loss: str | None = None  # which returned number of a loop's step is the loss
    skip_cells: str | None = None  # tags of cells of a notebook that are left out
    scratch: str | None = None  # the directory for files of this run's trials
    disk_bytes: Count = 0  # that a cache of a trial's may take of it; 0 where it is not on a local disk
    since: float = 0.0  # when the run began: temporary files that changed before are the user's


class WorkloadReference(Frozen):
    """The place of a workload: a file or a module, and a name in it."""

    file: str | None = None  # absolute path, or None for a module
    module: str | None = None  # dotted name, or None for a file
    name: str = "workload"
    search_path: tuple[str, ...] = ()  # put in front of `sys.path`
    args: tuple[str, ...] = ()  # `sys.argv[1:]` of the user's file
    script: ScriptSettings | None = None  # it is a script as it is, and no `Workload`
    called_as: str = ""  # a script's path as the user wrote it: it may be a link to `file`, or a notebook

    def __str__(self) -> str:
        """Return it as the user writes it: `path/to/file.py:name`; without a name for a script."""
        return self.shown if self.script is not None else f"{self.file or self.module}:{self.name}"

    @property
    def is_notebook(self) -> bool:
        """True for a notebook: `file` is its translation into a script, once that is written."""
        return self.called_as.endswith(".ipynb")

    @property
    def shown(self) -> str:
        """The file as the user wrote it, or from the current directory where it is below; or the module."""
        if self.called_as:
            return self.called_as
        return str(self.module) if self.file is None else self.file.removeprefix(os.path.join(os.getcwd(), ""))


class KnownWorkload(Frozen):
    """The facts of a workload in a run's record and in a recipe; most of them identify it."""

    name: str
    fingerprint: str = Field(description="`sha256:…` over its source file and name.")
    batched: bool = Field(False, description="Its dataset does its own batching, by `config.batch_size`.")
    drop_remainder: bool = Field(False, description="A smaller last batch is dropped.")
    takes_config: bool = Field(False, description="Its dataset() is given `Recipe.dataset_config`.")
    examples: Count | None = Field(None, description="Per epoch; null when endless or unknown.")
    element: str | None = Field(None, description="What a batch is, in words.")
    batch_ranks: Many[Count | None] | None = Field(None, description="Axes of each tensor of a batch; null if unknown.")
    parameters: Count | None = Field(None, description="The model's weights, as a count.")
    keras: KerasVersion = Field(KerasVersion.KERAS_3, description="The package and the major version of Keras.")
    script: ScriptFacts | None = Field(None, description="How a script trains, and where the knobs reach it.")
    settings: Many[str] = Field((), description="`NAME=value` of what acts on speed and is no knob, in all trials.")


class WorkloadFacts(KnownWorkload):
    """Facts that the template found by importing the user's module."""

    batch_size: int
    baseline: dict[str, Any]
    validates: bool
    in_force: dict[str, Any] = Field({})  # knobs that act before a model is built, once the module was imported
    uncontained: str = ""  # why the kernel does not keep out what trials write; empty where it does, or need not


class Gpu(Frozen, strict=True):
    """An NVIDIA GPU, or a MIG instance of it."""

    name: str  # as the driver calls it, such as `NVIDIA H200`
    memory_bytes: Count  # all of it, whoever uses it now
    compute_capability: str | None = None  # such as `9.0`
    # Modes, which may be switched: another one makes no other machine. None where the card has no such mode.
    ecc: bool | None = None
    persistence: bool | None = None
    mig: bool | None = None


class GpuUse(Frozen):
    """A GPU or MIG instance during a slice; None is what it does not report.

    A MIG instance reports no power, energy or utilisation. Clocks, heat and their limits are its card's.
    """

    sm_mhz: Count | None = None
    most_sm_mhz: Count | None = None
    watts: Amount | None = None  # the mean where energy is counted, else at the slice's end
    joules: Amount | None = None
    celsius: int | None = None
    limited_by: Many[str] | None = None  # what held the clocks at the slice's end, of `LIMITED_BY`
    utilisation: Amount | None = None  # share of the last sample (0.2 to 1 s) in which a kernel ran
    memory_utilisation: Amount | None = None  # share of it in which device memory was read or written
    used_bytes: Count | None = None  # by everybody
    free_bytes: Count | None = None
    others: Count | None = None  # processes on it, without the trial's own and frozen ones
    foreign_utilisation: Amount | None = None  # share of its processors' time that those took


_GIB = 1 << 30


class Machine(Frozen, strict=True):
    """A machine as this process may use it, and versions."""

    cpu: str  # the model's name
    cores: Annotated[Count, Field(ge=1)]
    memory_bytes: Count  # of the host
    platform: str  # kernel and architecture, such as `Linux x86_64`
    python: str
    packages: dict[str, str]  # installed versions by name
    gpus: Many[Gpu]  # in the driver's order
    driver: str | None  # NVIDIA's
    cuda: str | None  # the newest version that the driver can run, such as `12.8`
    cudnn: str | None  # as TensorFlow reports it; None until it was asked
    tensorflow_cuda: str | None = None  # that TensorFlow was built with; None until it was asked
    units: Many[str] = ()  # that compute in low precision, such as `amx_bf16`; see `machine.fingerprint`

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that stay the same as long as hardware, driver and versions do."""
        # TensorFlow's answers are left out: the same machine must not get another id once it was asked. Units follow
        # from the rest.
        modes = {"__all__": set(GPU_MODES)}
        facts = self.model_dump(
            mode="json", exclude={"cudnn": True, "tensorflow_cuda": True, "units": True, "gpus": modes}
        )
        # The kernel's own share of the memory changes by some megabytes with each of its updates.
        facts["memory_bytes"] = round(self.memory_bytes / _GIB) * _GIB
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def describe(self) -> str:
        """Return `Intel Xeon × 8 cores, 2 × NVIDIA H200`: processor, cores and GPUs in words."""
        return ", ".join(filter(None, [f"{self.cpu} × {plural(self.cores, 'core')}", gpu_names(self.gpus)]))

    def differences(self, other: Machine) -> tuple[str, ...]:
        """Return the differences that can make `other` faster or slower: `GPU: measured on NVIDIA H200, here none`."""
        return tuple(f"{label}: measured on {there}, here {here}" for label, there, here in self.unlike_facts(other))

    def unlike_facts(self, other: Machine) -> tuple[tuple[str, str, str], ...]:
        """Return the differences that can make `other` faster or slower: a label, the value of this, and of `other`."""
        gpus = gpu_names(self.gpus), gpu_names(other.gpus)
        if has_cards_of(self, other):
            gpus = gpus[0], gpus[0]
        pairs: list[tuple[str, str | None, str | None]] = [
            ("CPU", self.cpu, other.cpu),
            ("cores", str(self.cores), str(other.cores)),
            ("memory", *_sizes(self.memory_bytes, other.memory_bytes)),
            ("GPU", *gpus),
        ]
        if self.gpus and gpus[0] == gpus[1]:
            sizes = [min(gpu.memory_bytes for gpu in machine.gpus) for machine in (self, other)]
            pairs.append(("GPU memory", *_sizes(*sizes)))
            pairs.append(("NVIDIA driver", self.driver, other.driver))
        for label, package in (("TensorFlow", "tensorflow"), ("Keras", "keras")):
            pairs.append((label, self.packages.get(package), other.packages.get(package)))
        versions = [".".join(machine.python.split(".")[:2]) for machine in (self, other)]
        pairs.append(("Python", versions[0], versions[1]))
        return tuple((label, own or "none", others or "none") for label, own, others in pairs if own != others)


def has_cards_of(part: Machine, whole: Machine) -> bool:
    """Return whether a machine has no other cards than another, and no more of them: a seat has a part of a host's."""
    counts = [Counter(gpu.name for gpu in machine.gpus) for machine in (part, whole)]
    return bool(part.gpus) and counts[0].keys() == counts[1].keys() and counts[0] <= counts[1]


def gpu_names(gpus: tuple[Gpu, ...]) -> str:
    """Return `2 × NVIDIA H200, NVIDIA L4`; empty for none."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _sizes(measured: int, here: int) -> tuple[str, str]:
    """Return both sizes in GiB; the same text twice when they differ by no more than the tolerance."""
    if abs(here - measured) <= MEMORY_TOLERANCE * measured:
        here = measured
    return f"{measured / _GIB:.2f} GiB", f"{here / _GIB:.2f} GiB"
