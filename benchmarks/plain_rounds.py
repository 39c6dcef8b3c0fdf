"""Plain `fit` of a baseline and a candidate in turns, for `oracle.py`, `answers.py` and `plain_optuna.py`.

    python benchmarks/plain_rounds.py WORKLOAD.py

Imports the workload, then answers each line of JSON on standard input with a line of JSON. A fork serves each line,
so every answer comes from a fresh process. The first answer, which nobody asks for, describes the workload. A request
has the configurations `sides`, their `order` and `seconds`; the answer has the samples and seconds of each side.

Both train in that process in ABBA order; in four processes, where they differ in what acts on a whole process. A turn
is one `fit` of whole epochs, validation included, as in `plain_training.py`. The model that waits has no iterator.
"""

import contextlib
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from plain_training import trained

from autotune.machine.fingerprint import available_cores
from autotune.machine.gpu import read_gpus
from autotune.recipe import apply
from autotune.script.workload import Workload, call_with_config, takes_config
from autotune.space import freed_memory
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import KNOBS, Device, Stage
from autotune.space.space_file import ResolvedSpace, SearchSpace, find_search_space

PATIENCE_SECONDS = 900
"""An answer that takes longer has failed."""
WARMUP_SECONDS, WARMUP_SECONDS_LATER = 0.5, 0.1
"""Warm-up ends with the epoch in which these are over. In a first turn that epoch compiles."""


class Failed(Exception):
    """A training failed; the message says why in one line."""


class Rounds:
    """Plain trainings of one workload, each round in a fresh process.

    Args:
        process: `plain_rounds.py` at work.

    Raises:
        Failed: The workload cannot be imported.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._facts = self._answer()
        self._device = Device.GPU if read_gpus().gpus else Device.CPU
        named = {"jit_compile": self._device is Device.GPU, **self._facts["baseline"], **self._facts["set_by_dataset"]}
        if self._device is Device.CPU and not freed_memory.WHY_NOT:
            named.setdefault("keep_freed_memory", "none")  # as `tune` names it
        self.baseline = baseline_configuration(self._facts["batch_size"], named, self._device, where="Workload")
        self.examples: int = self._facts["examples"]

    def space(self, written: SearchSpace | None = None) -> ResolvedSpace:
        """A search space resolved for this workload and machine: the default of `autotune tune`, or another."""
        default = "gpu" if self._device is Device.GPU else "quick"
        return (written or find_search_space(default)).resolve(
            baseline=self.baseline,
            device=self._device,
            cores=available_cores(),
            examples=self.examples,
            dataset_takes_config=self._facts["takes_config"],
            fixed=dict.fromkeys(self._facts["set_by_dataset"], "the workload's dataset() sets it itself"),
        )

    def speeds(self, candidate: Configuration, seconds: float) -> tuple[float, float]:
        """Samples per second of the baseline and of a candidate, from one fresh process.

        Args:
            candidate: Differs from the baseline in no knob that acts when TensorFlow is imported.
            seconds: Shortest timed stretch of a turn. Each side has two turns.

        Raises:
            Failed: One of the two cannot be trained.
        """
        stages = {KNOBS[name].stage for name in candidate.differences(self.baseline)}
        if Stage.IMPORT in stages:
            raise Failed("a knob acts when TensorFlow is imported: it cannot differ from the baseline's here")
        order = ("baseline", "candidate", "candidate", "baseline")
        totals = {name: [0.0, 0.0] for name in order}
        for turns in [[name] for name in order] if Stage.RUNTIME in stages else [order]:
            sides = {"baseline": dict(self.baseline), "candidate": dict(candidate)}
            request = {"sides": {name: sides[name] for name in turns}, "order": turns, "seconds": seconds}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            for name, found in self._answer().items():
                totals[name] = [sum(pair) for pair in zip(totals[name], found, strict=True)]
        baseline, other = (samples / spent for samples, spent in totals.values())
        return baseline, other

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):  # others are a library's
                found: dict[str, Any] = json.loads(line)
                if "error" in found:
                    raise Failed(found["error"])
                return found
        raise Failed("the process ended early: run benchmarks/plain_rounds.py by hand to see why")


@contextlib.contextmanager
def plain_rounds(file: Path) -> Iterator[Rounds]:
    """Rounds of the workload in a file; all processes are killed in the end."""
    with subprocess.Popen(
        [sys.executable, __file__, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Rounds(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------ inside the training process


def imported(file: str) -> Workload:
    """The workload of a file. Imports TensorFlow."""
    sys.path.insert(0, str(Path(file).parent))
    workload: Workload = importlib.import_module(Path(file).stem).workload
    return workload


def model_and_data(workload: Workload, configuration: Configuration) -> tuple[Any, dict[str, Any]]:
    """A compiled model, and what `fit` is given to train it. The dtype policy must be set."""
    pipeline = apply.training_pipeline(
        call_with_config(workload.dataset, configuration),
        configuration,
        batched=workload.batched,
        drop_remainder=workload.drop_remainder,
    )
    assert workload.compile is not None
    model = workload.model()
    model.compile(**workload.compile(), **apply.compile_arguments(pipeline.in_force))
    return model, pipeline.fit_args


class Side:
    """One of both trainings.

    Args:
        workload: What is trained.
        configuration: How.
    """

    def __init__(self, workload: Workload, configuration: Configuration) -> None:
        self.samples, self.seconds = 0, 0.0
        self._warmup = WARMUP_SECONDS
        self._policy = configuration["precision"]
        self._set_policy()
        self._model, self._data = model_and_data(workload, configuration)
        self._validation = workload.validation and apply.pipeline(
            call_with_config(workload.validation, configuration), configuration, batched=workload.batched
        )

    def turn(self, seconds: float, examples: int) -> None:
        """Train for at least so long, up to the end of an epoch of so many examples."""
        self._set_policy()
        ends = trained(partial(self._model.fit, **self._data), self._validation, warmup=self._warmup, seconds=seconds)
        self._warmup = WARMUP_SECONDS_LATER
        self.samples += (len(ends) - 1) * examples
        self.seconds += ends[-1] - ends[0]

    def _set_policy(self) -> None:
        import keras

        keras.config.set_dtype_policy(self._policy)


def examples_in_epoch(workload: Workload) -> int:
    """Examples in an epoch of the baseline."""
    import keras

    configuration = Configuration({"batch_size": workload.batch_size})
    dataset = call_with_config(workload.dataset, configuration)
    if not workload.batched and dataset.cardinality() >= 0:
        return int(dataset.cardinality())
    batches = apply.pipeline(dataset, configuration, batched=workload.batched)
    return sum(int(keras.tree.flatten(batch)[0].shape[0]) for batch in batches)


def answer(workload: Workload, request: dict[str, Any]) -> dict[str, Any]:
    """What a request asks for; the facts of the workload if it is empty."""
    if not request:
        configuration = Configuration({"batch_size": workload.batch_size})
        return {
            "batch_size": workload.batch_size,
            "baseline": dict(workload.baseline),
            "takes_config": takes_config(workload.dataset),
            "examples": examples_in_epoch(workload),
            "set_by_dataset": apply.set_by_dataset(call_with_config(workload.dataset, configuration)),
        }
    asked = {name: Configuration(knobs) for name, knobs in request["sides"].items()}
    runtime = {name: value for name, value in next(iter(asked.values())).items() if KNOBS[name].stage is Stage.RUNTIME}
    apply.apply_before_build(runtime)  # which all sides have
    examples = examples_in_epoch(workload)
    sides = {name: Side(workload, configuration) for name, configuration in asked.items()}
    for name in request["order"]:
        sides[name].turn(request["seconds"], examples)
    return {name: (side.samples, side.seconds) for name, side in sides.items()}


def answer_in_fork(workload: Workload, request: dict[str, Any]) -> None:
    """Print the answer to a request."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_SECONDS)
        try:
            found = answer(workload, request)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(found), flush=True)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print(json.dumps({"error": f"the training ended with exit code {code}"}), flush=True)


def main(file: str) -> None:
    """A fork for each line."""
    workload = imported(file)
    for line in itertools.chain(["{}"], sys.stdin):
        answer_in_fork(workload, json.loads(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
