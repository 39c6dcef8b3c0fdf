"""Profiles some steady steps of a trial by TensorFlow's profiler, after its slices: profiled steps are slower."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.executors.log import printable
from autotune.stats.bottleneck import Ceilings

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

STEPS, LONGEST_SECONDS = 20, 3.0
"""Steps that are profiled, and no further one so long after the first; XProf reads windows of up to 10 s."""
FOLDER, WINDOW = "profile", "window.json"
"""Beside the log; and the file in it that says how many steps were profiled in how many seconds."""


class Profiler:
    """One window of profiled steps.

    Args:
        folder: Takes the files, which TensorBoard and XProf open.
        steps_per_call: Steps of what is traced as one.
    """

    def __init__(self, folder: Path, *, steps_per_call: int = 1) -> None:
        self._folder, self._steps_per_call = folder, steps_per_call
        self._steps = 0
        self._began = 0.0
        self._trace: Any = None

    def begin(self) -> None:
        """Begin the window, and its first step."""
        import tensorflow as tf

        tf.profiler.experimental.start(str(self._folder))
        self._began = time.perf_counter()
        self._begin_step()

    def stepped(self) -> bool:
        """A step is over; whether the window is, too."""
        self._trace.__exit__(None, None, None)
        self._steps += 1
        if self._steps < STEPS and time.perf_counter() - self._began < LONGEST_SECONDS:
            self._begin_step()
            return False
        import tensorflow as tf

        tf.test.experimental.sync_devices()
        seconds = time.perf_counter() - self._began
        tf.profiler.experimental.stop()
        told = {"steps": self._steps * self._steps_per_call, "seconds": seconds}
        (self._folder / WINDOW).write_text(json.dumps(told), encoding="utf-8")
        return True

    def _begin_step(self) -> None:
        import tensorflow as tf

        self._trace = tf.profiler.experimental.Trace("train", step_num=self._steps, _r=1)
        self._trace.__enter__()


def profile_fit(model: keras.Model, iterator: Any, dataset: tf.data.Dataset, folder: Path) -> str:
    """Profile steps of a model's train function; why that could not be done, or an empty string.

    Args:
        model: Compiled, and trained already.
        iterator: Of the training so far; the next batches come from it.
        dataset: Gives further batches where the iterator has none left.
        folder: Takes the profile.
    """
    import tensorflow as tf

    profiler = Profiler(folder, steps_per_call=int(model.steps_per_execution))
    try:
        profiler.begin()
        while True:
            try:
                model.train_function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                iterator = iter(dataset.repeat())
                model.train_function(iterator)
            if profiler.stepped():
                return ""
    except Exception as error:  # a profile that fails is no failed trial
        return printable(f"{type(error).__name__}: {error}")[:300]


def input_ceiling(dataset: tf.data.Dataset, batch_size: int, seconds: float) -> float | None:
    """Samples per second of the input pipeline alone; None where it yields too little to tell."""
    iterator = iter(dataset.repeat())
    if next(iterator, None) is None:
        return None
    began, batches = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or batches < 2:
        if next(iterator, None) is None:
            return None
        batches += 1
    return batches * batch_size / (time.perf_counter() - began)


def ceilings(
    dataset: tf.data.Dataset | None, *, examples_per_call: int, batch_size: int, kept: float | None, seconds: float
) -> Ceilings:
    """How fast the input pipeline and the step are alone."""
    by_input = None if dataset is None else input_ceiling(dataset, batch_size, seconds)
    return Ceilings(by_input=by_input, by_compute=examples_per_call / kept if kept else None)
