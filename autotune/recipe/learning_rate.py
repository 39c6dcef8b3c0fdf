"""Scale a learning rate by a rule: the updates take its multiple, and the script's own rate stays as it is."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from autotune.data.record import Rule
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import tf

RULES: tuple[Rule, ...] = ("as is", "sqrt", "linear")


def factor_of(rule: Rule, batch_ratio: float) -> float:
    """Return the factor of a learning rate by a rule. Linear suits SGD, the square root Adam and its kin.

    Sources: arXiv:1706.02677 and arXiv:2205.10287.
    """
    return {"as is": 1.0, "sqrt": math.sqrt(batch_ratio), "linear": batch_ratio}[rule]


def scale_updates(factor: Callable[[], Any]) -> None:
    """Have every optimizer of Keras in this process update weights with a multiple of its learning rate.

    The script reads and sets its own rate, so that its schedules, and what it sets while it trains, are scaled as well.
    `factor` is asked whenever an update is made or traced. It returns a number, or a variable that each update reads.
    """
    depth = 0  # of updates, one inside another

    def scale(rate: Any) -> Any:
        wanted = factor() if depth else 1.0
        if isinstance(wanted, float) and wanted == 1.0:
            return rate
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(wanted, rate.dtype)

    def count_depth(usual: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(usual)
        def update(*arguments: Any, **named: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return usual(*arguments, **named)
            finally:
                depth -= 1

        return update

    api = keras_api()
    api.scale_rates(scale)
    for owner in api.optimizer_bases():
        setattr(owner, api.update_method, count_depth(getattr(owner, api.update_method)))


def make_factor(strategy: Any) -> Any:
    """Return a variable for `scale_updates`, on the devices where a strategy of TensorFlow has learning rates."""
    with strategy.scope():
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return tf.Variable(1.0, trainable=False, aggregation=aggregation, name="scale_of_updates")


class ScaledTrainings:
    """Scales the updates of trainings by `fit`, and of nothing else in this process.

    The factor is a variable that traced functions read, so that it may change between two calls of `fit`.
    """

    def __init__(self) -> None:
        self._factor, self._variable = 1.0, None  # the variable is made when it is needed: it starts the runtime
        self._reading = weakref.WeakSet[Any]()  # models whose training function reads the variable
        scale_updates(lambda: 1.0 if self._variable is None else self._variable)

    @contextlib.contextmanager
    def scaled(self, model: Any, factor: float) -> Iterator[None]:
        """Scale the updates of what trains meanwhile."""
        if factor != 1.0 and model not in self._reading:
            if self._variable is None:
                self._variable = make_factor(model.distribute_strategy)
            model.train_function = None  # it may have been traced before there was the variable
            self._reading.add(model)
        before = self._factor
        self._set(factor)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, factor: float) -> None:
        self._factor = factor
        if self._variable is not None:
            self._variable.assign(factor)
