"""Compare the speed of a long training with its recipe's claim.

The guard counts calls of the train function. A callback that sees each batch would end Keras's asynchronous dispatch.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from autotune.data.facts import Machine
from autotune.data.printable import duration, printable, rate_text
from autotune.machine.fingerprint import fingerprint
from autotune.machine.telemetry import Counters, between, read_counters
from autotune.recipe.evidence import Evidence
from autotune.recipe.keras_api import keras_api, refuse_other_keras
from autotune.recipe.tf_private import keras
from autotune.space.keras_in_use import keras_in_use

LOG = "long_run.jsonl"
CHECK_SECONDS = 1.0  # between looks
WARM_SECONDS = 10.0  # at the beginning, which are not judged
JUDGE_SECONDS = 30.0  # of each stretch that is compared with the claim
LEAST_SECONDS = 5.0  # of a training that is compared with it at the end
WRITE_SECONDS = 10.0  # between lines of the log
WARN_BELOW_SHARE = 0.85  # share of the claimed throughput below which there is a warning
FOREIGN = 0.1  # share of the processor from which other processes are named as the cause


def say(text: str) -> None:
    """Write a line for the user of a long training, among the script's own."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"autotune: {printable(text)}\n")
        sys.stderr.flush()


class _Moment(NamedTuple):
    at: float
    calls: int


class Guard:
    """Compares a training's throughput with a recipe's claim, and says to the user where it is slow."""

    def __init__(
        self,
        evidence: Evidence,
        machine: Machine,
        *,
        log: Path | None = None,  # takes a line of JSON every ten seconds
        fills_cache: bool = False,  # in its first epoch, which the claim counts
        say: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._evidence, self._machine = evidence, machine
        self._log, self._say, self._clock, self._fills_cache = log, say, clock, fills_cache
        self.claimed = evidence.throughput.value
        self._calls = self._examples_per_call = 0
        self._epoch_examples = self._largest_call = 0  # of the epoch in progress
        self._checked_epoch = evidence.examples_per_epoch is None
        self._is_other_work = False  # the first epoch was not the recipe's
        self._calls_of_first_epoch: int | None = None
        self._seen = weakref.WeakSet[Any]()  # train functions, which compile in their first call
        self._looked: _Moment | None = None
        self._first: _Moment | None = None  # the end of the first call, which has traced and compiled
        self._called_at = self._written_at = 0.0
        self._early: _Moment | None = None  # warm, but within the first epoch, which compiles as it ends
        self._warm: _Moment | None = None
        self._window: _Moment
        self._counters: Counters
        self._warned = False

    def wrap(self, train_function: Callable[[Any], Any], *, examples_per_call: int) -> Callable[[Any], Any]:
        """Return a `train_function` that counts its calls."""
        compiles = self._looked is not None and train_function not in self._seen
        self._seen.add(train_function)

        def counted(iterator: Any) -> Any:
            nonlocal compiles
            logs = train_function(iterator)
            if not compiles:
                self.called(examples_per_call)
                return logs
            # What passed since the last look is left out: another model was made and compiled.
            assert self._looked is not None and self._first is not None
            now = self._clock()
            pause, self._looked = now - self._looked.at, _Moment(now, self._calls)
            self._first = self._first._replace(at=self._first.at + pause)
            if self._warm is not None:
                self._warm, self._window = (_Moment(of.at + pause, of.calls) for of in (self._warm, self._window))
            compiles = False
            return logs

        return counted

    def called(self, examples: int) -> None:
        """Count a call that has trained on so many examples; 0 stands for as many as in the call before."""
        self._examples_per_call = examples or self._examples_per_call
        self._calls += 1
        self._epoch_examples += self._examples_per_call
        self._largest_call = max(self._largest_call, self._examples_per_call)
        now = self._called_at = self._clock()
        if self._examples_per_call and (self._looked is None or now - self._looked.at >= CHECK_SECONDS):
            self._look(now)

    def epoch_ended(self) -> None:
        """Compare the first epoch with the recipe's: an epoch of other work is not the training that was tuned.

        Later epochs are measured from the end of the first, which has compiled for its last batch and for validation.
        """
        self._called_at = self._clock()
        if self._looked is not None and self._calls_of_first_epoch in (None, self._calls):
            self._calls_of_first_epoch, self._early = self._calls, self._early or self._warm
            self._warm = self._looked = _Moment(self._called_at, self._calls)
            self._begin_window(self._warm)
        seen, expected, self._epoch_examples = self._epoch_examples, self._evidence.examples_per_epoch, 0
        if self._checked_epoch or expected is None or not seen:
            return
        self._checked_epoch = True
        self._is_other_work = abs(seen - expected) >= self._largest_call  # the last call may have fewer examples
        if self._is_other_work:
            self._say(
                f"the first epoch trained on about {seen:,} examples instead of the recipe's {expected:,}: the data is "
                "another, or the script ends an epoch by a number of steps; tune it again"
            )

    def _look(self, now: float) -> None:
        self._looked = _Moment(now, self._calls)
        if self._first is None:
            self._first, self._written_at = self._looked, now
        if self._warm is None:
            if not self._fills_cache and now - self._first.at >= WARM_SECONDS:
                self._warm = self._looked
                self._begin_window(self._looked)
            return
        if now - self._written_at >= WRITE_SECONDS:
            self._write(now, self._rate_since(self._warm))
        if now - self._window.at < JUDGE_SECONDS:
            return
        share = self._rate_since(self._window) / self.claimed
        if share < WARN_BELOW_SHARE and not self._warned and not self._is_other_work:
            self._warned = True
            seconds = now - self._window.at
            seen = between(self._counters, read_counters(), seconds=seconds)
            foreign, cores = seen["foreign_cpu_seconds"], seen["cores"]
            cause = "the input may be slower than it was, the machine throttled, or other callbacks and data used"
            if differences := self._machine.differences(fingerprint()):
                cause = "this is another machine: " + "; ".join(differences)
            elif foreign is not None and foreign > FOREIGN * cores * seconds:
                cause = f"other processes take {foreign / cores / seconds:.0%} of the processor"
            self._say(f"{rate_text(share * self.claimed)} samples/s, {share:.0%} of what the recipe claims: {cause}")
        self._begin_window(self._looked)

    def _begin_window(self, now: _Moment) -> None:
        self._window, self._counters = now, read_counters()

    def _rate_since(self, moment: _Moment) -> float:
        """Return the samples per second since then."""
        assert self._looked is not None
        return (self._looked.calls - moment.calls) * self._examples_per_call / (self._looked.at - moment.at)

    def _write(self, now: float, rate: float) -> None:
        self._written_at = now
        if self._log is None:
            return
        line = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "samples_per_second": float(f"{rate:.6g}"),
            "of_claim": round(rate / self.claimed, 4),
            "calls": self._calls,
        }
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    @property
    def throughput(self) -> float | None:
        """Samples per second since it was warm, as last looked at; None if that is too short to tell."""
        for begun in (self._first,) if self._fills_cache else (self._warm, self._early):
            if begun is not None and self._looked is not None and self._looked.at - begun.at >= LEAST_SECONDS:
                return self._rate_since(begun)
        return None

    def ended(self) -> None:
        """Say in one line how fast the training was, now that it has ended."""
        if self._first is None:
            why = "how many examples a step has is not known" if self._calls else "the tuned training did not run"
            self._say(f"the speed is not compared: {why}")
            return
        self._looked = _Moment(self._called_at, self._calls)
        rate, evidence = self.throughput, self._evidence
        if rate is None:
            self._say(f"too short to compare ({self._called_at - self._first.at:.0f} s)")
            return
        self._write(self._called_at, rate)
        before, examples = evidence.baseline_throughput.value, evidence.examples_per_epoch
        if self._is_other_work:
            reason = "epochs differ from the recipe's, so this is not comparable with its baseline"
            self._say(f"{rate_text(rate)} samples/s; {reason}")
            return
        speeds = f"{rate_text(rate)} samples/s, was {rate_text(before)}"
        if examples is not None:
            speeds = f"{_seconds(examples / rate)} per epoch, was {_seconds(examples / before)}"
        claim = evidence.speedup.shown() if evidence.objective != "energy" else f"×{self.claimed / before:.2f}"
        self._say(f"{speeds}: ×{rate / before:.2f}; claimed {claim}")


def _seconds(length: float) -> str:
    return f"{length:.3g} s" if length < 100 else duration(length)


def guard_callback(guard: Guard, batch_size: int, *, may_train_again: bool = False) -> Any:
    """Return the guard as a callback of `fit`. It sees training and epochs begin and end, and no batch."""
    tuned = keras_in_use()

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def set_model(self, model: Any) -> None:
            refuse_other_keras(model, tuned)
            super().set_model(model)

        def on_train_begin(self, logs: Any = None) -> None:
            self._usual = self.model.train_function
            examples = batch_size * keras_api().steps_per_execution(self.model)
            self.model.train_function = guard.wrap(self._usual, examples_per_call=examples)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            guard.epoch_ended()

        def on_train_end(self, logs: Any = None) -> None:
            self.model.train_function = self._usual
            if not may_train_again:
                guard.ended()

    return Watch()
