"""One call of `model.fit` by a script: what it trains on, and how it can be trained with other knobs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.recipe import apply
from autotune.scripts.chain import batch_calls, calls_for, examples_of, mean_batch
from autotune.scripts.settings import Settings
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Stage
from autotune.worker.private_api import data_adapter, split_off

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

DEFAULT_BATCH = 32  # Keras's, for arrays


@dataclass(frozen=True, kw_only=True)
class FitCall:
    """A call of `fit`, with its arguments by name."""

    model: keras.Model
    arguments: Mapping[str, Any]
    settings: Settings

    @property
    def kind(self) -> str:
        """What is trained on: `arrays`, `dataset`, `py_dataset`, or `generator`."""
        import keras
        import tensorflow as tf

        x = self.arguments["x"]
        if isinstance(x, tf.data.Dataset):
            return "dataset"
        if isinstance(x, tf.distribute.DistributedDataset):
            return "distributed"
        if isinstance(x, keras.utils.PyDataset):
            return "py_dataset"
        return "generator" if hasattr(x, "__next__") else "arrays"

    @property
    def batch_size(self) -> int | None:
        """What the script says itself; None where it does not say."""
        if self.kind == "arrays":
            return int(self.arguments["batch_size"] or DEFAULT_BATCH)
        if self.kind == "py_dataset":
            return _attribute(self.arguments["x"])
        if self.kind == "dataset":
            calls, _ = batch_calls(self.arguments["x"])
            return calls[0].given if calls else None
        return None

    @property
    def batch_used(self) -> int | None:
        """The batch size with the settings."""
        given = self.batch_size
        if given is None:
            return None
        if self.kind == "dataset":
            return int(batch_calls(self.arguments["x"])[0][0].used)
        return int(self.settings.value("batch_size", given))

    def with_arrays(self) -> tuple[Any, Any]:
        """`(x, y, sample_weight)` and the validation data, once `validation_split` has been split off."""
        arguments = self.arguments
        whole = (arguments["x"], arguments["y"], arguments["sample_weight"])
        share, held_out = arguments["validation_split"], arguments["validation_data"]
        if share and held_out is None:
            return split_off(whole, share)
        return whole, held_out

    def source(self, x: Any) -> Any:
        """A `PyDataset` with the settings."""
        if self.kind != "py_dataset":
            return x
        for knob in ("workers", "use_multiprocessing", "max_queue_size"):
            if knob in self.settings.changes:
                setattr(x, knob, self.settings.changes[knob])
        if "batch_size" in self.settings.changes:
            x.batch_size = self.settings.changes["batch_size"]
        return x

    def training_dataset(self) -> tuple[tf.data.Dataset, Any]:
        """The batches of the training as a dataset, and what `fit` is given: the same, or a `PyDataset`."""
        (x, y, weights), _ = self.with_arrays()
        if self.kind == "dataset":
            return x, x
        source = self.source(x)
        adapter = data_adapter(
            source,
            y,
            weights,
            batch_size=self.batch_used,
            steps_per_epoch=None,
            shuffle=self.arguments["shuffle"],
            class_weight=self.arguments["class_weight"],
        )
        dataset = adapter.get_tf_dataset()
        batches = adapter.num_batches
        if self.kind != "arrays" and batches:
            dataset = dataset.apply(_cardinality(batches))
        return dataset, dataset if self.kind == "arrays" else source

    def validation(self) -> tf.data.Dataset | None:
        """The batches of a validation, as a dataset."""
        import tensorflow as tf

        _, held_out = self.with_arrays()
        if held_out is None:
            return None
        if not isinstance(held_out, tf.data.Dataset):
            x, y, weights = (
                (*held_out, None, None)[:3] if isinstance(held_out, tuple | list) else (held_out, None, None)
            )
            size = self.arguments["validation_batch_size"] or self.batch_used or DEFAULT_BATCH
            adapter = data_adapter(
                x, y, weights, batch_size=size, steps_per_epoch=None, shuffle=False, class_weight=None
            )
            held_out = adapter.get_tf_dataset()
            if adapter.num_batches:
                held_out = held_out.apply(_cardinality(adapter.num_batches))
        steps = self.arguments["validation_steps"]
        return held_out.take(int(steps)) if steps else held_out

    def steps_per_epoch(self, dataset: tf.data.Dataset) -> int | None:
        """Of the script's, for batches of another size; None where the end of the data ends an epoch."""
        given = self.arguments["steps_per_epoch"]
        if not given:
            return None
        size, used = self.batch_size, self.batch_used
        return int(given) if not size or not used else max(1, round(int(given) * size / used))

    def examples(self, dataset: tf.data.Dataset) -> int | None:
        """Of an epoch; None where they must be counted.

        Args:
            dataset: Of batches.
        """
        used, steps = self.batch_used, self.steps_per_epoch(dataset)
        if used is None or self.kind == "distributed":
            return None
        if steps is not None:
            return round(steps * mean_batch(dataset, used))
        if self.kind == "arrays":
            import keras

            return int(keras.tree.flatten(self.with_arrays()[0][0])[0].shape[0])
        return examples_of(dataset, used)

    def drops_remainder(self, dataset: tf.data.Dataset) -> bool:
        """Whether a smaller last batch is dropped."""
        calls, _ = batch_calls(dataset)
        return bool(calls and calls[0].drop_remainder)

    def pipeline(self, dataset: tf.data.Dataset, source: Any, configuration: Configuration) -> apply.TrainingPipeline:
        """How the training reads its batches with the knobs of a configuration.

        Args:
            dataset: Of batches.
            source: What `fit` is given where that is no dataset.
            configuration: The values in force.
        """
        steps = self.steps_per_epoch(dataset)
        own = source is not dataset or self.kind == "distributed"
        acting = configuration
        if own or self.kind == "arrays" or calls_for(dataset, "prefetch"):  # it prefetches by itself
            acting = acting.replace(prefetch=0)
        if own:
            plain = {name: KNOBS[name].default for name in acting if KNOBS[name].stage is Stage.OPTIONS}
            acting = acting.replace(
                persistent_iterator=False, **{name: each for name, each in plain.items() if each is not None}
            )
        if steps is None:
            made = apply.training_pipeline(dataset, acting, batched=True)
        else:
            made = apply.pipeline_in_steps(dataset, acting, steps)
        in_force = made.in_force.replace(prefetch=configuration["prefetch"])
        return dataclasses.replace(made, in_force=in_force, source=source if own else None)


def _attribute(x: Any) -> int | None:
    """The batch size of a `PyDataset` that has one, and that reads another one from there; None otherwise."""
    size = getattr(x, "batch_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def honours_batch_size(x: Any) -> bool:
    """Whether a `PyDataset` yields other batches once its attribute is another."""
    import keras

    size = _attribute(x)
    if size is None or len(x) < 3:
        return False
    batches = len(x)
    try:
        x.batch_size = 2 * size
        first = keras.tree.flatten(x[0])[0]
        return len(first) == 2 * size and len(x) == math.ceil(batches / 2)
    except Exception:  # whatever the user's class raises for another size
        return False
    finally:
        x.batch_size = size


def _cardinality(batches: int) -> Any:
    import tensorflow as tf

    return tf.data.experimental.assert_cardinality(batches)
