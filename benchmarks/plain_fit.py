"""The reference of `benchmarks/epochs.py`: `model.fit` as a user writes it, knowing nothing of the tuner.

Reads cases (`COUNT BATCH VALIDATED`) from its standard input, one a line. Each trains in a fork of its own, whose
number is printed, and which then prints the time (CLOCK_MONOTONIC, seconds) at the end of each epoch, until killed.
"""

import os
import signal
import sys
import time
from typing import Any

import keras
import tiled

from autotune.runtime.supervisor import die_with_parent


class EpochEnds(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Prints when an epoch ends, validation included."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print the time."""
        print(time.monotonic(), flush=True)


def train(count: int, batch: int, validated: bool) -> None:
    """Without end."""
    model = tiled.network()
    model.compile(**tiled.compile_arguments())
    model.fit(
        tiled.shuffled(count).batch(batch),
        validation_data=tiled.held_out(count).batch(batch) if validated else None,
        epochs=1 << 30,
        verbose=0,
        callbacks=[EpochEnds()],
    )


def main() -> None:
    """A fork for each line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    me = os.getpid()
    for line in sys.stdin:
        count, batch, validated = map(int, line.split())
        if os.fork() == 0:
            die_with_parent(me)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            print(os.getpid(), flush=True)
            train(count, batch, bool(validated))


if __name__ == "__main__":
    main()
