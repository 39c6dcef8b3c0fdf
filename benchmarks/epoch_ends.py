"""How epochs end while `tf.data` tunes a pipeline: how many in a stall, when that ends, and what trials tell of it.

    python benchmarks/epoch_ends.py [--quick] [--json FILE]

Prints one table, for pipelines that sleep, so that epochs are as long as they are meant to be whatever the machine does
(one serial, one with threads), and for the one of `examples/photos_jpeg.py`. Long epochs are trained by plain
`model.fit`; of each, two times are noted: how old its iterator was when the next epoch began, and when that one's
first call did. In between an iterator goes.

Trials take three things for granted when they charge long epochs for stalls (`autotune/measure/epoch_ends.py`). When a
stall ends: the age at which stalls ended over the one that is expected. That long epochs stall as often as the short
ones that a trial trains: the shares of both. And that without tuning there is none: what trials would make of that.
"""

import dataclasses
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from figures import Figure, factor, mean, parser, report, share

from autotune.measure.epoch_ends import EpochEnd, stall_seconds
from autotune.trial import boundary
from autotune.trial.step_clock import Training

ELEMENT_SECONDS = 0.01
"""What a sleeping pipeline sleeps for each element; a step takes one."""
LONG_SECONDS = 0.9
LONG_EPOCHS, LONG_EPOCHS_QUICK = 40, 8
REPEATS, REPEATS_QUICK = 8, 2
"""How often trials' short epochs are trained: each time gives one share."""
TELLING_SECONDS = 0.05
"""An end whose stall would be shorter is left out of the long epochs' share."""
BATCH = 32


def slept(element: np.ndarray) -> np.ndarray:
    """The element, a little later."""
    time.sleep(ELEMENT_SECONDS)
    return element


def sleeping(calls: int | None) -> tuple[tf.data.Dataset, keras.Model]:
    """A pipeline that sleeps, serially or in so many threads, and what is trained on it."""
    steps = round(LONG_SECONDS / (1.2 * ELEMENT_SECONDS))

    def late(row: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.ensure_shape(tf.numpy_function(slept, [row], tf.float32), (8,)), tf.zeros(1)

    rows = tf.data.Dataset.from_tensor_slices(np.zeros((steps * (calls or 1), 8), "float32"))
    dataset = rows.map(late, num_parallel_calls=calls).batch(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return dataset if calls is None else dataset.prefetch(2), model


def photographs() -> tuple[tf.data.Dataset, keras.Model]:
    """The example's pipeline and network."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import photos_jpeg

    images = tf.data.Dataset.from_tensor_slices(photos_jpeg.patches()).shuffle(photos_jpeg.PATCHES)
    model = photos_jpeg.network()
    model.compile(**photos_jpeg.compile_arguments())
    return images.map(photos_jpeg.seen).batch(BATCH), model


KINDS: dict[str, Callable[[], tuple[tf.data.Dataset, keras.Model]]] = {
    "serial": lambda: sleeping(None),
    "threads": lambda: sleeping(2),
    "photos_jpeg": photographs,
}


class Times(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
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


def long_ends(dataset: tf.data.Dataset, model: keras.Model, epochs: int) -> tuple[list[EpochEnd], float]:
    """How whole epochs ended, and the shortest gap."""
    times = Times()
    model.fit(dataset, epochs=epochs + 2, verbose=0, shuffle=False, callbacks=[times])
    gaps = [called - began for began, called in zip(times.began, times.called, strict=True)]
    seen = [
        EpochEnd(age=began - called, gap=gap)
        for called, began, gap in zip(times.called, times.began[1:], gaps[1:], strict=False)
    ]
    return seen[1:], min(gaps[1:])  # the first epoch compiles, and before it no iterator goes


def told_by_trials(dataset: tf.data.Dataset, model: keras.Model, *, tuned: bool) -> float | None:
    """The share that a trial has from its short epochs; of a pipeline that is not tuned, if it took it for one."""
    steps = int(dataset.cardinality().numpy())
    training = Training(
        steps_per_call=1,
        batch_size=1,
        examples=steps,
        drop_remainder=False,
        iterations=None,
        synchronise=tf.test.experimental.sync_devices,
    )
    short = boundary._short_epochs(model, dataset, None, training, ELEMENT_SECONDS)
    if not tuned:
        short, dataset = dataclasses.replace(short, ends=[]), boundary._untuned(dataset)
    _, told = boundary._ends_with_stalls(model, dataset, training, short, ELEMENT_SECONDS)
    return told


def figures(kind: str, epochs: int, repeats: int) -> dict[str, Figure]:
    """One pipeline's."""
    dataset, model = KINDS[kind]()
    seen, usual = long_ends(dataset, model, epochs)
    telling = [each for each in seen if stall_seconds(each.age + usual) >= TELLING_SECONDS]
    stalls = [each for each in telling if each.gap - usual > stall_seconds(each.age + usual) / 2]
    found: dict[str, Figure] = {}
    if telling:
        found["whole epochs that end in a stall, plain fit"] = share(len(stalls), len(telling))
    if len(stalls) > 1:
        late = [
            math.log((each.age + each.gap) / (each.age + usual + stall_seconds(each.age + usual)))
            for each in stalls
        ]
        found["iterator's age when stalls ended, over expected"] = factor(late)
    for tuned, name in ((True, "by trials' short epochs"), (False, "by those, without tuning")):
        told = [told_by_trials(dataset, model, tuned=tuned) for _ in range(repeats)]
        known = [each for each in told if each is not None]
        if known:
            found[f"share {name}"] = mean(known)
    return {f"{kind}: {name}": figure for name, figure in found.items()}


def main() -> None:
    """Train, print, and write."""
    arguments = parser(__doc__).parse_args()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    epochs, repeats = (LONG_EPOCHS_QUICK, REPEATS_QUICK) if arguments.quick else (LONG_EPOCHS, REPEATS)
    found = itertools.chain.from_iterable(figures(kind, epochs, repeats).items() for kind in KINDS)
    report("epoch_ends", dict(found), arguments.json)


if __name__ == "__main__":
    main()
