"""Short trainings for their losses alone, on recorded examples.

`LossRuns` compare two configurations of one batch size: the same batches, the same fresh weights, and the loss of each
step. `BranchRuns` compare batch sizes: from fresh weights every batch size looks alike, and losses of the steps
themselves depend on the batch. So the baseline's process saves weights and optimizer once it has trained. Each training
here begins with that state, reads the same recorded examples in an order drawn by its seed, and is evaluated on a fixed
probe after equal numbers of examples.

No callback of the script's runs in these: its schedule goes on by steps, and where a callback sets the learning rate,
each training has the rate that was in force at the state.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.data.errors import WorkloadError
from autotune.data.record import Outcome
from autotune.recipe.keras_api import keras_api
from autotune.recipe.learning_rate import make_factor, scale_updates
from autotune.recipe.tf_private import keras, tf
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import BranchRuns, LossCurves, LossRuns
from autotune.training import gauges
from autotune.training.gauges import Weights
from autotune.training.step_counters import COUNTED_STEPS, Counted, ReadVariables, changing, handles_of, writing_hooks

LARGEST_RECORDING_BYTES = 256 << 20  # batches are recorded up to here, at least one, and then repeat
LARGEST_STATE_BYTES = 2 << 30  # of weights and optimizer together: a larger state is not saved
LEAST_DISTANCE = 5  # of batches that are left out of a recording for the probe
PROBE_BATCHES = 4  # of the recorded size, that are evaluated at once
ROUNDING = 2.0**-8  # relative: the distance between neighbours of bfloat16, the coarsest format there is to choose
Curve = tuple[float | None, ...]  # by step or probe, see `protocol.LossCurves`


def train_losses(
    runs: LossRuns | BranchRuns,
    model: Callable[[], keras.Model],
    batches: Callable[[], tf.data.Dataset],
    *,
    batch_size: int,
    held_out: Callable[[], tf.data.Dataset | None],
    examples: int | None,  # of an epoch, of which only full batches are recorded; None if it is infinite or unknown
    callbacks: Sequence[Any] = (),  # the script's
    fresh_model: Callable[[], keras.Model] | None = None,  # whose weights a training begins with; None for `model`'s
) -> LossCurves:
    """Run the trainings that are asked for."""
    probe = held_out() if isinstance(runs, BranchRuns) else None
    keras.utils.set_random_seed(runs.seeds[0])  # for what draws a seed of its own: dropout, augmentation
    if isinstance(runs, BranchRuns):
        return branch_losses(model(), batches, probe, runs, batch_size=batch_size, callbacks=callbacks)
    return loss_curves(model, batches, runs, batch_size=batch_size, examples=examples, fresh_model=fresh_model)


def _prepare(model: keras.Model, batch: Any) -> None:
    """Make the train function, the weights and the optimizer's variables."""
    with model.distribute_strategy.scope():
        model.make_train_function()
        _build(model, batch)
        if getattr(model, "optimizer", None) is not None:
            keras_api().build_optimizer(model.optimizer, model.trainable_variables)


def _build(model: keras.Model, batch: Any) -> None:
    """Make the weights of a model that has not seen its input yet; those of a model without `call` are there."""
    if not model.built:
        with contextlib.suppress(NotImplementedError):
            model(batch[0] if isinstance(batch, tuple) else batch, training=False)


def _values(variables: Iterable[Any]) -> list[Any]:
    return [variable.numpy() for variable in variables]


def _assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def describe_losses(model: keras.Model, curves: tuple[Curve, ...], counted: Counted | None = None) -> LossCurves:
    """Return the message with the losses of trainings of a model."""
    weights = gauges.describe_weights(Weights(model.weights, model.trainable_weights))
    return LossCurves(curves=curves, gpus=gauges.gpu_names(), counted=counted or {}, **weights)


def _open_recording(folder: str) -> str:
    """Return the folder of a recording by a descriptor: TensorFlow takes brackets in a path for a pattern."""
    below = os.open(Path(folder).parent, os.O_RDONLY)
    return f"/proc/self/fd/{below}/{Path(folder).name}"


def _most_recorded(batches: tf.data.Dataset) -> int:
    """Return how many batches a recording may have."""
    parts = tf.nest.flatten(next(iter(batches)), expand_composites=True)  # of ragged and sparse tensors
    size = sum(int(part.shape.num_elements()) * part.dtype.size for part in parts if part is not None)
    return int(max(1, LARGEST_RECORDING_BYTES // max(1, size)))


# --------------------------------------------------------------------------------------------- from fresh weights


def loss_curves(
    model: Callable[[], keras.Model],
    batches: Callable[[], tf.data.Dataset],
    runs: LossRuns,
    *,
    batch_size: int,
    examples: int | None,
    fresh_model: Callable[[], keras.Model] | None = None,
) -> LossCurves:
    """Return the loss of each step of each training. Steps are called one by one, and batches are read once."""
    recorded = _record(batches, runs, batch_size, examples)
    trained, first_batch = model(), next(iter(recorded))
    _prepare(trained, first_batch)
    optimizer = getattr(trained, "optimizer", None)
    of_optimizer = [] if optimizer is None else keras_api().optimizer_variables(optimizer)
    as_built, untouched = [] if fresh_model else _values(trained.weights), _values(of_optimizer)
    curves: list[Curve] = []
    first_weights: list[Any] = []
    steps = runs.most_steps
    for seed in runs.seeds:
        keras.utils.set_random_seed(seed)
        _assign(trained.weights, _fresh_values(fresh_model(), trained, first_batch) if fresh_model else as_built)
        own = _values(trained.trainable_variables)
        first_weights = first_weights or own
        if seed != runs.seeds[0] and all(map(np.array_equal, own, first_weights)):
            # Weights that no seed changes, such as pretrained ones, are moved by as much as rounding might.
            noise = np.random.default_rng(seed)
            moved = [w * (1 + ROUNDING * noise.uniform(-1, 1, w.shape)).astype(w.dtype) for w in own]
            _assign(trained.trainable_variables, moved)
        _assign(of_optimizer, untouched)
        curves.append(_step_losses(trained, recorded, steps, math.inf if curves else runs.seconds))
        steps = len(curves[0])
    return describe_losses(trained, tuple(curves))


def _record(
    batches: Callable[[], tf.data.Dataset], runs: LossRuns, batch_size: int, examples: int | None
) -> tf.data.Dataset:
    """Return the recorded batches, over and over; record them where no other trial has."""
    folder = _open_recording(runs.folder)
    if not Path(folder).exists():
        source = batches()
        whole = max(1, examples // batch_size) if examples else runs.most_steps
        source.take(min(runs.most_steps, whole, _most_recorded(source))).save(folder)
    recorded = tf.data.Dataset.load(folder).cache().repeat()
    if runs.recorded_batch_size != batch_size:
        recorded = recorded.unbatch().batch(batch_size, drop_remainder=True)
    return recorded


def _fresh_values(fresh: keras.Model, trained: keras.Model, batch: Any) -> list[Any]:
    """Return the weights of a fresh model, which must be its own."""
    _build(fresh, batch)
    ours = {id(variable) for variable in trained.trainable_variables}
    if any(id(variable) in ours for variable in fresh.trainable_variables):
        raise WorkloadError(
            "model() returns the same weights each time, so no two trainings can begin the same way",
            hint="Build the model, or the part of it that is trained, inside model().",
        )
    return _values(fresh.weights)


def _step_losses(model: keras.Model, batches: tf.data.Dataset, steps: int, seconds: float) -> Curve:
    """Return the loss of each step; none begins later than so many seconds after the first step, which compiles."""
    iterator = iter(model.distribute_strategy.experimental_distribute_dataset(batches))
    curve: list[float | None] = []
    deadline = math.inf
    while len(curve) < steps and time.perf_counter() <= deadline:
        model.reset_metrics()
        logs = model.train_function(iterator)
        if not isinstance(logs, dict) or "loss" not in logs:
            break
        loss = float(logs["loss"])
        if not curve:
            deadline = time.perf_counter() + seconds
        curve.append(loss if math.isfinite(loss) else None)
    return tuple(curve)


# ------------------------------------------------------------------------------------ from a state of the baseline's


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
    part of a step; `callbacks` may change it.

    Raises:
        TrialFailed: The state does not fit this model, or examples cannot be batched anew.
    """
    training, probe = _record_with_probe(batches, held_out, runs)
    factor = make_factor(model.distribute_strategy)
    scale_updates(lambda: factor)
    model.train_function = None  # an earlier `fit` may have traced one that does not scale
    model.make_test_function()
    _prepare(model, next(iter(training.batch(1))))
    state, variables, rest = _read_state(model, runs.state), _variables(model).values(), _rest(model)
    untouched = _values(rest)
    deadline = time.perf_counter() + runs.seconds
    _assign(variables, state)
    counted = _count_steps(model, training, callbacks, batch_size=batch_size)
    curves: dict[tuple[float, int], Curve] = {}
    for seed, scale in itertools.product(runs.seeds, runs.scales):
        _seed(model, seed)
        _assign(variables, state)
        _assign(rest, untouched)
        factor.assign(scale)
        curve = _probe_losses(model, training, probe, runs, batch_size=batch_size, seed=seed, deadline=deadline)
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


def _rest(model: keras.Model) -> list[Any]:
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
    return [*own, *outside]


def _seed(model: keras.Model, seed: int) -> None:
    """Seed all later random draws, such as dropout; layers of Keras 3 have generators of their own."""
    keras.utils.set_random_seed(seed)
    draws, weights = np.random.default_rng(seed), {id(weight) for weight in model.weights}
    for variable in model.variables:
        if id(variable) not in weights and getattr(variable, "path", "").endswith("seed_generator_state"):
            variable.assign(draws.integers(1 << 31, size=variable.shape).astype(variable.dtype))


def _read_state(model: keras.Model, file: str) -> list[Any]:
    """Read a saved state, in the order of the variables. Raises TrialFailed where it is that of other variables."""
    variables = _variables(model)
    with np.load(file, allow_pickle=False) as saved:
        state = {name: saved[name] for name in saved.files}
    shapes = {name: tuple(values.shape) for name, values in state.items()}
    if shapes == {name: tuple(variable.shape) for name, variable in variables.items()}:
        return [state[name] for name in variables]
    kinds, own = keras_api().optimizer_bases(), list[str]()
    for name, value in vars(model).items():  # as of a GAN; `_self_` begins TensorFlow's own names
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, kinds) for part in parts) and name != "optimizer" and not name.startswith("_self_"):
            own.append(f"{model.name}.{name}")
    why = "the baseline's weights and optimizer state do not fit the model of this configuration"
    if own:
        why = f"{', '.join(own)}: the model has optimizers beside that of compile(), and their state is not saved"
    raise TrialFailed(Outcome.ERROR, why)


def _record_with_probe(
    batches: Callable[[], tf.data.Dataset], held_out: tf.data.Dataset | None, runs: BranchRuns
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return the recorded training examples and the probe's batches; record both where no other trial has."""
    folder = _open_recording(runs.folder)
    probes = max(1, runs.probe_examples // runs.recorded_batch_size)
    if not Path(folder).exists():
        source = batches()
        wanted = -(-(runs.examples + (runs.probe_examples if held_out is None else 0)) // runs.recorded_batch_size)
        most = max(2, _most_recorded(source))
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


def _probe_losses(
    model: keras.Model,
    examples: tf.data.Dataset,
    probe: tf.data.Dataset,
    runs: BranchRuns,
    *,
    batch_size: int,
    seed: int,
    deadline: float,
) -> Curve:
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
