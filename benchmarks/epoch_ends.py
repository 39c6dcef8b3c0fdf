"""How epochs end while `tf.data` tunes a pipeline: how many in a stall, and how long that lasts.

    python benchmarks/epoch_ends.py [--quick] [--json FILE]

Prints one table. A tiny network trains, by plain `model.fit`, on pipelines that mostly sleep, so that epochs are as
long as they are meant to be. Of each epoch two times are noted: how old its iterator was when the next epoch began,
and when that one's first call did. In between an iterator goes.

A trial takes two things for granted when it charges long epochs for stalls (`autotune/trial/epoch_ends.py`). When a
stall ends: the table has the age at which stalls ended over the one that is expected. And that long epochs stall as
often as short ones: the table has the shares of each, for a pipeline that runs serially and for one with threads.
Without tuning there should be no stall; those are its last rows.
"""

import itertools
import logging
import math
import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from figures import Figure, factor, parser, report, share

from autotune.trial.epoch_ends import EpochEnd, awakening, stalled

ELEMENT_SECONDS = 0.01
"""What the pipeline sleeps for each element; a step takes one."""
SHORT_SECONDS = 0.1
LONG_SECONDS = (0.9, 3.5)
EPOCHS = {0.1: 80, 0.9: 40, 3.5: 8}
EPOCHS_QUICK = {0.1: 20, 0.9: 8, 3.5: 2}
UNTUNED_EPOCHS = 20
KINDS = ("serial", "threads")


def slept(element: np.ndarray) -> np.ndarray:
    """The element, a little later."""
    time.sleep(ELEMENT_SECONDS)
    return element


def pipeline(kind: str, seconds: float, *, tuned: bool) -> tf.data.Dataset:
    """One that takes about so long."""
    steps = round(seconds / ELEMENT_SECONDS)
    calls = 2 if kind == "threads" else None
    dataset = tf.data.Dataset.from_tensor_slices(np.zeros((steps * (calls or 1), 8), "float32"))

    def late(row: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.ensure_shape(tf.numpy_function(slept, [row], tf.float32), (8,)), tf.zeros(1)

    dataset = dataset.map(late, num_parallel_calls=calls).batch(1)
    if kind == "threads":
        dataset = dataset.prefetch(2)
    options = tf.data.Options()
    options.autotune.enabled = tuned
    return dataset.with_options(options)


class Times(keras.callbacks.Callback):
    """When epochs and their first calls began."""

    def on_train_begin(self, logs: object = None) -> None:
        """Nothing was seen yet."""
        self.began: list[float] = []
        self.called: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """The old iterator is there still."""
        self.began.append(time.perf_counter())

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """It is gone."""
        if batch == 0:
            self.called.append(time.perf_counter())


def ends(kind: str, seconds: float, epochs: int, *, tuned: bool = True) -> tuple[list[EpochEnd], float]:
    """How epochs ended, and the usual gap between two."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    times = Times()
    model.fit(pipeline(kind, seconds, tuned=tuned), epochs=epochs + 2, verbose=0, callbacks=[times])
    gaps = [called - began for began, called in zip(times.began, times.called, strict=True)]
    seen = [
        EpochEnd(age=began - called, gap=gap)
        for called, began, gap in zip(times.called, times.began[1:], gaps[1:], strict=False)
    ]
    return seen[1:], min(gaps)  # the first epoch compiles


def main() -> None:
    """Train, print, and write."""
    arguments = parser(__doc__).parse_args()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    found: dict[str, Figure] = {}
    for kind, (seconds, epochs) in itertools.product(
        KINDS, (EPOCHS_QUICK if arguments.quick else EPOCHS).items()
    ):
        seen, usual = ends(kind, seconds, epochs)
        told = [(each, stalled(each, usual)) for each in seen]
        stalls = [each for each, is_one in told if is_one]
        clear = sum(is_one is not None for _, is_one in told)
        name = f"{kind}, epochs of {seconds:g} s"
        found[f"{name}: ends in a stall"] = (
            share(len(stalls), clear) if clear else {"value": None, "ci95": None, "bar": None, "count": 0}
        )
        if len(stalls) > 1:
            late = [math.log((each.age + each.gap) / awakening(each.age + usual)) for each in stalls]
            found[f"{name}: age at its end over the expected"] = factor(late)
    for kind in KINDS:
        seen, usual = ends(kind, LONG_SECONDS[0], UNTUNED_EPOCHS, tuned=False)
        told = [stalled(each, usual) for each in seen]
        found[f"{kind}, without tuning: ends in a stall"] = share(
            sum(each is True for each in told), sum(each is not None for each in told)
        )
    report("epoch_ends", found, arguments.json)


if __name__ == "__main__":
    main()
