"""Trains a script's own loop from the baseline's state, for the losses of its steps."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from autotune.data.record import Outcome
from autotune.recipe.learning_rate import scale_updates
from autotune.recipe.tf_private import keras
from autotune.runtime import protocol
from autotune.runtime.failures import TrainingFailed
from autotune.runtime.fork_server import leave
from autotune.script.loop_trial import LoopHooks
from autotune.space.keras_in_use import keras_in_use
from autotune.stats.same_loss import window_means
from autotune.training import gauges
from autotune.training.slices import finite_loss

NO_LOSS = "the step of the script's loop returns no loss: return the batch's mean loss from it, or name it with --loss"


class BranchedLoop(LoopHooks):
    """Trains the loop of a script from the baseline's state, and sends the means of its losses."""

    def __post_init__(self) -> None:
        """Make what takes the losses."""
        super().__post_init__()
        assert isinstance(self.request.losses, protocol.LoopBranch)
        self._training = self.request.losses
        keras.utils.set_random_seed(self._training.seed)  # for what draws before the branch
        self.wrappers.order_seed = self._training.seed
        self._first_examples = 0  # read before the variables have taken the state
        self._examples = 0  # trained on since
        self._steps: list[tuple[int, float]] = []  # since: their examples and losses
        self._has_begun = self._has_branched = False

    def imported(self, name: str) -> None:
        """See `Hooks`."""
        if name == keras_in_use().package:
            scale_updates(lambda: self._training.scale)
        super().imported(name)

    def restarts(self) -> bool:
        """See `TrialHooks`: a training that ended has too few losses."""
        if self._has_begun:
            trained, wanted = self._examples, self._training.examples
            reason = f"the script's training ended after {trained} of {wanted} examples from where it branched"
            self.fail(TrainingFailed(Outcome.ERROR, reason))
        return False

    def stepped(self, examples: int, logs: Any) -> None:
        """See `Hooks`."""
        self._obey(partial(self._step, examples, self._named(logs)))

    def _step(self, examples: int, logs: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._check()
        if not self._has_branched:
            self._first_examples += examples
            if self._first_examples >= self._training.first_examples:
                self._branch()
            return
        try:
            loss = finite_loss(logs, step=len(self._steps) + 1)
        except TrainingFailed:  # it has diverged
            self._send((None,) * self._training.windows)
        if loss is None:
            raise TrainingFailed(Outcome.ERROR, NO_LOSS)
        self._steps.append((examples, loss))
        self._examples += examples
        if self._examples >= self._training.examples:
            self._send(tuple(window_means(self._steps, self._training.examples, self._training.windows)))

    def _branch(self) -> None:
        """Give the variables the baseline's values, and the further training the randomness of its seed."""
        self._variables.restore(self._training.state)
        keras.utils.set_random_seed(self._training.seed)  # again: the script may have set another one
        self._has_branched = True

    def _send(self, curve: tuple[float | None, ...]) -> NoReturn:
        """Send the losses, and end."""
        first = tuple(loss for _, loss in self._steps[:1]) or (None,)
        self.channel.send(protocol.LossCurves(curves=(curve, first), gpus=gauges.gpu_names()))
        leave(0)
