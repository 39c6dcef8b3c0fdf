"""Trainings that branch from a state of the baseline's, for their losses on a fixed probe.

They compare batch sizes: from fresh weights every batch size looks alike, and losses of the steps themselves depend on
the batch. So the baseline's process saves weights and optimizer once it has trained, and each training here begins with
that state, reads the same recorded examples in an order drawn by its seed, and is evaluated after equal numbers of
examples.

No callback of the script's runs in these: its schedule goes on by steps, and where a callback sets the learning rate,
each training has the rate that was in force at the state.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.data.record import Outcome
from autotune.recipe.keras_api import keras_api
from autotune.recipe.learning_rate import make_factor, scale_updates
from autotune.recipe.tf_private import keras, tf
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import BranchRuns, LossCurves
from autotune.training.losses import build, describe_losses, most_recorded, open_recording
from autotune.training.step_counters import COUNTED_STEPS, Counted, ReadVariables, changing, handles_of, writing_hooks

PROBE_BATCHES = 4  # of the recorded size, that are evaluated at once
LARGEST_STATE_BYTES = 2 << 30  # of weights and optimizer together: a larger state is not saved
LEAST_DISTANCE = 5  # of batches that are left out of a recording for the probe


def save_state(model: keras.Model, file: Path) -> bool:
    """Save the weights and the optimizer's variables of a model; return whether they are small enough for that."""
    variables = _variables(model)
    if sum(int(np.prod(tuple(variable.shape))) * 4 for variable in variables.values()) > LARGEST_STATE_BYTES:
        return False
    partial = file.with_suffix(".part")  # a process that is killed leaves no half of a state
    with partial.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **{name: variable.numpy() for name, variable in variables.items()})
    partial.replace(file)
    return True


def _variables(model: keras.Model) -> dict[str, Any]:
    """Return the variables of a training by names that another process of the same training gives them, too.

    Gradients that an optimizer accumulates, and a loss scale, are left out: not every configuration has them.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    accumulated = {id(variable) for variable in getattr(optimizer, "_accumulated_gradients", None) or ()}
    kept = [variable for variable in keras_api().optimizer_variables(optimizer) if id(variable) not in accumulated]
    return {
        **{f"weight {place}": variable for place, variable in enumerate(model.weights)},
        **{f"slot {place}": variable for place, variable in enumerate(kept)},
    }


def branch_losses(
    model: keras.Model,
    batches: Callable[[], tf.data.Dataset],
    held_out: tf.data.Dataset | None,
    runs: BranchRuns,
    *,
    batch_size: int,
    callbacks: Sequence[Any] = (),
) -> LossCurves:
    """Return the losses on the probe, of each scale of the learning rate with all seeds; empty where time was short.

    All scales of a seed are run before the next seed. `counted` has what changes with the steps in the script's own
    part of a step; `callbacks` are the script's, which may change it.

    Raises:
        TrialFailed: The state does not fit this model, or examples cannot be batched anew.
    """
    training, probe = _recorded(batches, held_out, runs)
    factor = make_factor(model.distribute_strategy)
    scale_updates(lambda: factor)
    model.make_train_function(force=True)  # an earlier `fit` may have traced one that does not scale
    model.make_test_function()
    first = next(iter(training.batch(1)))
    build(model, first)
    keras_api().build_optimizer(model.optimizer, model.trainable_variables)
    state = _read_state(model, runs.state)
    rest = _rest(model)
    untouched = {name: variable.numpy() for name, variable in rest.items()}
    deadline = time.perf_counter() + runs.seconds
    _assign(_variables(model), state)
    counted = _count_steps(model, training, callbacks, batch_size=batch_size)
    curves: dict[tuple[float, int], tuple[float | None, ...]] = {}
    for seed, scale in itertools.product(runs.seeds, runs.scales):
        _seed(model, seed)
        _assign(_variables(model), state)
        _assign(rest, untouched)
        factor.assign(scale)
        curve = _train(model, training, probe, runs, batch_size=batch_size, seed=seed, deadline=deadline)
        curves[scale, seed] = curve if len(curve) == runs.probes else ()
    ordered = tuple(curves.get((scale, seed), ()) for scale in runs.scales for seed in runs.seeds)
    return describe_losses(model, ordered, counted)


def _count_steps(
    model: keras.Model, examples: tf.data.Dataset, callbacks: Sequence[Any], *, batch_size: int
) -> Counted:
    """Train a few steps with the script's callbacks; return what changes with them."""
    batches = examples.repeat().batch(batch_size, drop_remainder=True)
    iterator = iter(model.distribute_strategy.experimental_distribute_dataset(batches))
    callback_list = keras.callbacks.CallbackList(list(callbacks), model=model, epochs=1, verbose=0)
    variables, values = ReadVariables(model), []

    def tell(event: str, *given: Any) -> None:
        with contextlib.suppress(Exception):  # what the script's callback makes of a few steps is of no matter
            getattr(callback_list, event)(*given)

    tell("on_train_begin")
    tell("on_epoch_begin", 0)
    for step in range(COUNTED_STEPS):
        tell("on_train_batch_begin", step)
        with variables.watch():
            model.train_function(iterator)
        tell("on_train_batch_end", step, {"loss": 0.0})
        values.append(variables.values())
    return changing(values) | dict.fromkeys(writing_hooks(callbacks, variables.includes), (1.0,))


def _rest(model: keras.Model) -> dict[str, Any]:
    """Return the variables that are not in the state: the optimizer's other variables, and those outside of the model.

    A loss may read one that a callback or a step changes. Generators of random numbers get a seed by themselves.
    """
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    saved = _variables(model).values()
    own = [v for v in keras_api().optimizer_variables(model.optimizer) if not any(v is known for known in saved)]
    of_metrics = (variable for metric in model.metrics for variable in metric.variables)
    inside = {id(handle) for v in (*saved, *own, *model.variables, *of_metrics) for handle in handles_of(v)}
    variables = (v for v in gc.get_objects() if type(v) is ResourceVariable and id(v.handle) not in inside)
    outside = (v for v in variables if hasattr(v.handle, "numpy") and "StateVar" not in v.name and v.is_initialized())
    return {str(place): variable for place, variable in enumerate((*own, *outside))}


def _seed(model: keras.Model, seed: int) -> None:
    """Seed all later random draws, such as dropout; layers of Keras 3 have generators of their own."""
    keras.utils.set_random_seed(seed)
    draws, weights = np.random.default_rng(seed), {id(weight) for weight in model.weights}
    for variable in model.variables:
        if id(variable) not in weights and getattr(variable, "path", "").endswith("seed_generator_state"):
            variable.assign(draws.integers(1 << 31, size=variable.shape).astype(variable.dtype))


def _read_state(model: keras.Model, file: str) -> dict[str, Any]:
    """Read a saved state. Raises TrialFailed where it is that of other variables."""
    variables = _variables(model)
    with np.load(file, allow_pickle=False) as saved:
        state = {name: saved[name] for name in saved.files}
    shapes = {name: tuple(values.shape) for name, values in state.items()}
    if shapes != {name: tuple(variable.shape) for name, variable in variables.items()}:
        why = "the baseline's weights and optimizer state do not fit the model of this configuration"
        if own := _own_optimizers(model):
            why = f"{', '.join(own)}: the model has optimizers beside that of compile(), and their state is not saved"
        raise TrialFailed(Outcome.ERROR, why)
    return state


def _own_optimizers(model: keras.Model) -> list[str]:
    """Return the attributes of a model that hold optimizers beside that of `compile`, as a GAN has."""
    kinds = keras_api().optimizer_bases()

    def holds(value: Any) -> bool:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        return any(isinstance(part, kinds) for part in parts)

    given = {name: value for name, value in vars(model).items() if not name.startswith("_self_")}  # TensorFlow's own
    return [f"{model.name}.{name}" for name, value in given.items() if name != "optimizer" and holds(value)]


def _assign(variables: dict[str, Any], values: dict[str, Any]) -> None:
    for name, variable in variables.items():
        variable.assign(values[name])


def _recorded(
    batches: Callable[[], tf.data.Dataset], held_out: tf.data.Dataset | None, runs: BranchRuns
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return the recorded training examples and the probe's batches; record both where no other trial has."""
    folder = open_recording(runs.folder)
    probes = max(1, runs.probe_examples // runs.recorded_batch_size)
    if not Path(folder).exists():
        source = batches()
        wanted = -(-(runs.examples + (runs.probe_examples if held_out is None else 0)) // runs.recorded_batch_size)
        most = max(2, most_recorded(source))
        source.take(min(wanted, most)).save(f"{folder}/training")
        if held_out is not None:
            distance = max(1, min(int(held_out.cardinality()), most) // probes)  # as far as is read of a training
            held_out.shard(distance, 0).take(probes).save(f"{folder}/probe")
    training = tf.data.Dataset.load(f"{folder}/training")
    if held_out is not None:
        probe = tf.data.Dataset.load(f"{folder}/probe")
    else:
        distance = probe_distance(int(training.cardinality()), probes)  # batches from all over the recording
        probe = training.shard(distance, distance - 1)
        rest = training.enumerate().filter(lambda place, batch: place % distance != distance - 1)
        training = rest.map(lambda place, batch: batch)  # AutoGraph cannot tell two lambdas of one line apart
    # Without gradients larger batches fit, too; and calls cost more than small batches do.
    return training.unbatch().cache(), probe.rebatch(PROBE_BATCHES * runs.recorded_batch_size).cache()


def probe_distance(batches: int, probes: int) -> int:
    """Return the number of batches of which the last is for the probe, where so many are wanted of them all.

    It is 5 at least, so that a small recording is for training; with fewer batches than that, one is for the probe.
    """
    return max(min(LEAST_DISTANCE, batches), -(-batches // probes))


def _train(
    model: keras.Model,
    examples: tf.data.Dataset,
    probe: tf.data.Dataset,
    runs: BranchRuns,
    *,
    batch_size: int,
    seed: int,
    deadline: float,
) -> tuple[float | None, ...]:
    """Return the losses on the probe; fewer where the time is over."""
    distribute = model.distribute_strategy.experimental_distribute_dataset
    shuffled = examples.shuffle(runs.examples, seed=seed, reshuffle_each_iteration=True).repeat()
    iterator = iter(distribute(shuffled.batch(batch_size, drop_remainder=True)))
    steps = [round(runs.examples * number / runs.probes / batch_size) for number in range(1, runs.probes + 1)]
    done, curve = 0, list[float | None]()
    for wanted in steps:
        while done < wanted:
            if time.perf_counter() > deadline:
                return tuple(curve)
            model.train_function(iterator)
            done += 1
        curve.append(_probe_loss(model, distribute(probe)))
    return tuple(curve)


def _probe_loss(model: keras.Model, probe: Any) -> float | None:
    """Return the loss on the probe; None where it is not finite. Raises TrialFailed where the model has none."""
    model.reset_metrics()
    logs: Any = None
    for_probe = iter(probe)
    while True:
        try:
            logs = model.test_function(for_probe)
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    if not isinstance(logs, dict) or "loss" not in logs:
        raise TrialFailed(Outcome.ERROR, "the model reports no loss on held-out examples")
    loss = float(logs["loss"])
    return loss if math.isfinite(loss) else None
