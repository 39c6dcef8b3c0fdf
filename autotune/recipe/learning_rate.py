"""Scale a learning rate by a rule: the updates take it so many times, and the script's own rate stays as it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from autotune.data.record import Rule
from autotune.recipe.tf_private import keras, tf

RULES: tuple[Rule, ...] = ("as is", "sqrt", "linear")


def factor_of(rule: Rule, batch_ratio: float) -> float:
    """Return the factor of a learning rate by a rule. Linear suits SGD, the square root Adam and its kin.

    Sources: arXiv:1706.02677 and arXiv:2205.10287.
    """
    return {"as is": 1.0, "sqrt": math.sqrt(batch_ratio), "linear": batch_ratio}[rule]


def usual_rule(optimizer: str) -> Rule:
    """Return the rule that suits an optimizer of this class as a rule; see `factor_of`."""
    return "linear" if optimizer == "SGD" else "sqrt"


def scale_updates(factor: Callable[[], Any]) -> None:
    """Have every optimizer of Keras in this process update weights with so many times its learning rate.

    The script reads and sets its own rate, so that its schedules, and what it sets while it trains, are scaled as well.

    Args:
        factor: Asked whenever an update is made or traced. Returns a number, or a variable that each update reads.
    """
    owner = keras.optimizers.Optimizer
    usual_rate, usual_apply = inspect.getattr_static(owner, "learning_rate"), owner.apply
    depth = 0  # of calls of `apply`, one inside another

    def rate_of(optimizer: Any) -> Any:
        rate, wanted = usual_rate.fget(optimizer), factor() if depth else 1.0
        if isinstance(wanted, float) and wanted == 1.0:
            return rate
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(wanted, rate.dtype)

    @functools.wraps(usual_apply)
    def apply(optimizer: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return usual_apply(optimizer, *arguments, **named)
        finally:
            depth -= 1

    owner.learning_rate, owner.apply = property(rate_of, usual_rate.fset), apply


def make_factor(strategy: Any) -> Any:
    """Return a variable for `scale_updates`, on the devices where a strategy of TensorFlow has learning rates."""
    with strategy.scope():
        return keras.Variable(
            1.0, dtype="float32", trainable=False, aggregation="only_first_replica", name="scale_of_updates"
        )


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
