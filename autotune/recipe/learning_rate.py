"""Scale a learning rate by a rule: a number, a schedule of Keras as a whole, or what a callback sets."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

from autotune.data.errors import ApplyError
from autotune.data.record import Rule
from autotune.recipe.tf_private import keras

RULES: tuple[Rule, ...] = ("as is", "sqrt", "linear")


def factor_of(rule: Rule, batch_ratio: float) -> float:
    """Return the factor of a learning rate by a rule. Linear suits SGD, the square root Adam and its kin.

    Sources: arXiv:1706.02677 and arXiv:2205.10287.
    """
    return {"as is": 1.0, "sqrt": math.sqrt(batch_ratio), "linear": batch_ratio}[rule]


def scale_learning_rate(optimizer: Any, factor: float, callbacks: Iterable[Any] = ()) -> tuple[float, float] | None:
    """Multiply the learning rate of an optimizer of Keras, and what these callbacks set of it.

    Returns:
        The rate before and after, as the optimizer's next step takes it; None where the factor is 1.

    Raises:
        ApplyError: There is no learning rate that can be scaled.
    """
    if math.isclose(factor, 1.0):
        return None
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # below the loss scale of float16
    schedule = getattr(optimizer, "_learning_rate", None)
    try:
        before = float(optimizer.learning_rate)
        is_schedule = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
        optimizer.learning_rate = _scaled_schedule(schedule, factor) if is_schedule else before * factor
    except (TypeError, ValueError, AttributeError) as error:
        raise ApplyError(
            f"the learning rate of {type(optimizer).__name__} cannot be scaled: {error}",
            hint="Scale it in the script, and give --keep-learning-rate.",
        ) from error
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.LearningRateScheduler):
            callback.schedule = _scaled_function(callback.schedule, factor)
    return before, before * factor


def _scaled_schedule(schedule: Any, factor: float) -> Any:
    """Return a schedule that gives so many times what another one gives."""

    class Scaled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # Keras ships no types
        def __call__(self, step: Any) -> Any:
            return factor * schedule(step)

        def get_config(self) -> dict[str, Any]:
            return {**schedule.get_config(), "scaled_by": factor}

    return Scaled()


def _scaled_function(usual: Any, factor: float) -> Any:
    """Return a function of epoch and learning rate, for `LearningRateScheduler`, that gives so many times as much."""

    def scaled(epoch: int, rate: float | None = None) -> float:
        try:
            return factor * float(usual(epoch, None if rate is None else rate / factor))
        except TypeError:  # an older kind takes the epoch alone
            return factor * float(usual(epoch))

    return scaled


def usual_rule(optimizer: str) -> Rule:
    """Return the rule that suits an optimizer of this class as a rule; see `factor_of`."""
    return "linear" if optimizer == "SGD" else "sqrt"


def scale_updates(factor: Callable[[], float]) -> None:
    """Have every optimizer of Keras in this process update weights with so many times its learning rate.

    The script reads and sets its own rate, so that its schedules, and what it sets while it trains, are scaled as well.

    Args:
        factor: Asked whenever an update is made or traced.
    """
    owner = keras.optimizers.Optimizer
    usual_rate, usual_apply = inspect.getattr_static(owner, "learning_rate"), owner.apply
    depth = 0  # of calls of `apply`, one inside another

    def rate_of(optimizer: Any) -> Any:
        rate, wanted = usual_rate.fget(optimizer), factor() if depth else 1.0
        return rate if wanted == 1.0 else wanted * rate

    @functools.wraps(usual_apply)
    def apply(optimizer: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return usual_apply(optimizer, *arguments, **named)
        finally:
            depth -= 1

    owner.learning_rate, owner.apply = property(rate_of, usual_rate.fset), apply
