"""One training of a script, for `learning.py`: prints when each epoch ended, and its held-out loss.

    python benchmarks/held_out_losses.py RECIPE SCRIPT [ARGUMENT]...

Trains as `autotune run RECIPE SCRIPT` does; with `-` for RECIPE, as the script does by itself. Keras's own callback
`History`, which every `fit` has, is watched: the script, its calls of `fit` and its batches are left alone. The last
line is JSON, with moments of the machine's monotonic clock.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def watch_epochs(ends: list[tuple[float, float]]) -> None:
    """Note the end of each epoch, and its held-out loss."""
    import keras

    usual = keras.callbacks.History.on_epoch_end

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        ends.append((time.monotonic(), float(logs["val_loss"])))
        usual(self, epoch, logs)

    keras.callbacks.History.on_epoch_end = on_epoch_end


def main(recipe: str, script: str, *args: str) -> None:
    """Train, and print the losses."""
    ends: list[tuple[float, float]] = []
    if recipe == "-":
        sys.argv[:], sys.path[0] = [script, *args], str(Path(script).parent)
        watch_epochs(ends)
        runpy.run_path(script, run_name="__main__")
    else:
        from autotune.data.options import LongRunOptions
        from autotune.script.long_run import prepare_run

        train = prepare_run(Path(recipe), script, list(args), LongRunOptions())
        watch_epochs(ends)
        if status := train():
            raise SystemExit(status)
    print("\n" + json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
