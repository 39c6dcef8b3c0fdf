"""One trial of `plain_optuna.py`, as people write it: prints samples per second of a short plain `fit`.

    python benchmarks/plain_trial.py WORKLOAD.py EXAMPLES CONFIGURATION

EXAMPLES is the number of examples in an epoch, CONFIGURATION a JSON object. A callback counts the steps. There is no
validation, as is usual in such loops.
"""

import json
import sys
import time

from plain_rounds import imported, model_and_data
from plain_training import ENDLESS

from autotune.recipe import apply
from autotune.space.configuration import Configuration

WARMUP_STEPS, TIMED_STEPS = 20, 60


def main(file: str, examples_text: str, configuration_text: str) -> None:
    """Train, and print the speed as a line of JSON."""
    examples, configuration = int(examples_text), Configuration(json.loads(configuration_text))
    apply.apply_in_training(configuration)
    workload = imported(file)
    import keras

    class Speed(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Times the steps after the warm-up, then ends training."""

        began: tuple[float, int] | None = None
        samples_per_second = 0.0

        def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self.samples_before = epoch * examples

        def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
            now, batch_size = time.perf_counter(), configuration.batch_size
            samples = self.samples_before + min((batch + 1) * batch_size, examples)
            if self.began is None:
                self.began = (now, samples) if samples >= WARMUP_STEPS * batch_size else None
            elif samples - self.began[1] >= TIMED_STEPS * batch_size:
                self.samples_per_second = (samples - self.began[1]) / (now - self.began[0])
                self.model.stop_training = True

    speed = Speed()
    model, data = model_and_data(workload, configuration)
    model.fit(**data, epochs=ENDLESS, verbose=0, callbacks=[speed])
    print(json.dumps({"samples_per_second": speed.samples_per_second}))


if __name__ == "__main__":
    main(*sys.argv[1:])
