"""Watches a long training that uses a recipe: is it as fast as was claimed?

It counts calls of the train function, and reads the clock about once a second. Keras has to wait for nothing: a
callback that sees each batch would end its asynchronous dispatch.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.devices.machine import fingerprint
from autotune.devices.telemetry import Counters, between, read_counters
from autotune.executors.log import printable

if TYPE_CHECKING:
    from autotune.recipe.recipe import Recipe

LOG = "long_run.jsonl"
CHECK_SECONDS, WARM_SECONDS, JUDGE_SECONDS = 1.0, 10.0, 30.0
"""How often the clock is read; what counts for nothing at the beginning; and the stretch that is judged."""
WRITE_SECONDS = 10.0
SLOW = 0.85
"""Of the claimed throughput: a slower training gets one warning."""
FOREIGN = 0.1
"""Share of the processor that others take, from which they are named as a cause."""


def say(text: str) -> None:
    """A line for the user of a long training, beside the script's own."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"autotune: {printable(text)}\n")
        sys.stderr.flush()


class Guard:
    """Compares a training's throughput with a recipe's claim.

    Args:
        recipe: Whose.
        log: A file that takes a line of JSON every ten seconds; None for none.
        say: Takes a line for the user.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        log: Path | None = None,
        say: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recipe, self._log, self._say, self._clock = recipe, log, say, clock
        self._claimed = recipe.evidence.throughput.value
        self._calls, self._next_check = 0, 1
        self._examples_per_call = 0
        self._first: float | None = None
        self._since: float | None = None
        self._calls_since = 0
        self._looked_at, self._calls_looked, self._written_at = 0.0, 0, 0.0
        self._window_at, self._window_calls = 0.0, 0
        self._counters: Counters | None = None
        self._warned = False

    def wrap(self, train_function: Callable[[Any], Any], *, examples_per_call: int) -> Callable[[Any], Any]:
        """`train_function`, with its calls counted."""
        self._examples_per_call = examples_per_call

        def counted(iterator: Any) -> Any:
            logs = train_function(iterator)
            self.called()
            return logs

        return counted

    def called(self, examples_per_call: int = 0) -> None:
        """A call is over; a loop's own tells how many examples it takes."""
        self._examples_per_call = examples_per_call or self._examples_per_call
        self._calls += 1
        if self._calls >= self._next_check:
            self._look()

    def _look(self) -> None:
        now = self._clock()
        if self._first is None:  # the first call has traced and compiled
            self._first = self._looked_at = self._written_at = now
            self._next_check = self._calls + 1
            return
        calls, seconds = self._calls - self._calls_looked, now - self._looked_at
        pace = calls / max(seconds, 1e-6)
        self._next_check = self._calls + max(1, min(round(pace * CHECK_SECONDS), 2 * calls))
        self._looked_at, self._calls_looked = now, self._calls
        if self._since is None:
            if now - self._first >= WARM_SECONDS:
                self._since, self._calls_since = now, self._calls
                self._begin_window(now)
            return
        if now - self._written_at >= WRITE_SECONDS:
            self._write(now)
        window = now - self._window_at
        if window < JUDGE_SECONDS:
            return
        rate = (self._calls - self._window_calls) * self._examples_per_call / window
        if rate < SLOW * self._claimed and not self._warned:
            self._warned = True
            share, cause = rate / self._claimed, self._cause(window)
            self._say(f"{rate:,.0f} samples/s, {share:.0%} of what the recipe claims: {cause}")
        self._begin_window(now)

    def _begin_window(self, now: float) -> None:
        self._window_at, self._window_calls, self._counters = now, self._calls, read_counters()

    @property
    def throughput(self) -> float | None:
        """Samples per second since the training was warm; None where that is too short."""
        if self._since is None or self._looked_at <= self._since:
            return None
        calls = self._calls_looked - self._calls_since
        return calls * self._examples_per_call / (self._looked_at - self._since)

    @property
    def factor(self) -> float | None:
        """Throughput over the claimed one."""
        return None if self.throughput is None else self.throughput / self._claimed

    def _cause(self, seconds: float) -> str:
        differences = self._recipe.machine.differences(fingerprint())
        if differences:
            return "the machine is another: " + "; ".join(differences)
        assert self._counters is not None
        seen = between(self._counters, read_counters(), seconds=seconds)
        foreign, cores = seen["foreign_cpu_seconds"], seen["cores"]
        if foreign is not None and foreign > FOREIGN * cores * seconds:
            return f"other processes take {foreign / cores / seconds:.0%} of the processor"
        return "the input may be slower than it was, the machine throttled, or other callbacks and data used"

    def _write(self, now: float) -> None:
        self._written_at = now
        if self._log is None or self.throughput is None:
            return
        line = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "samples_per_second": round(self.throughput, 2),
            "of_claim": round(self.factor or 0.0, 4),
            "calls": self._calls,
        }
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def ended(self) -> None:
        """The training is over: say how fast it was."""
        if self._first is None:
            return
        self._looked_at, self._calls_looked = self._clock(), self._calls
        if self.throughput is None or self._looked_at - (self._since or 0.0) < CHECK_SECONDS:
            return
        self._write(self._looked_at)
        evidence = self._recipe.evidence
        gain = self.throughput / evidence.baseline_throughput.value
        self._say(
            f"trained at {self.throughput:,.0f} samples/s, ×{gain:.2f} of the baseline when it was tuned "
            f"(claimed: ×{evidence.speedup.value:.2f})"
        )


def guard_callback(guard: Guard, batch_size: int) -> Any:
    """The guard as a callback of `fit`. It sees the beginning and the end of the training, and no batch."""
    import keras

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_train_begin(self, logs: Any = None) -> None:
            self._usual = self.model.train_function
            examples = batch_size * int(self.model.steps_per_execution)
            self.model.train_function = guard.wrap(self._usual, examples_per_call=examples)

        def on_train_end(self, logs: Any = None) -> None:
            self.model.train_function = self._usual
            guard.ended()

    return Watch()
