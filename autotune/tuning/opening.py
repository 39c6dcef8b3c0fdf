"""The opening that `tune` and `verify` share: the workload is imported, and the baseline started and timed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.devices.machine import Machine
from autotune.executors.executor import Clock, Trials, WarmUp
from autotune.record import Slice
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.tuning.beside import BASELINE_SECONDS, Beside
from autotune.tuning.loop import CLOSING_SECONDS, OVERRUN_SHARE
from autotune.tuning.progress import Began, Notice, Observer
from autotune.tuning.resuming import Earlier, refuse_another_workload
from autotune.tuning.run import Run
from autotune.tuning.surroundings import as_imported, instabilities, oddities, refuse_knobs_that_cannot_act
from autotune.tuning.waiting import Deadline
from autotune.workloads.workload import WorkloadFacts, WorkloadReference

BASELINE_SHARE = 0.35
"""Of the budget: what the baseline may take until it is warm, where that is more than `BASELINE_SECONDS`."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run whose baseline is warm.

    Args:
        run: What all parts share.
        facts: What importing the workload told.
        beside: The live baseline.
        warm: What the baseline told once it was warm.
        deadline: When every wait has ended.
        import_seconds: What a fresh template takes to import everything; 0 where each trial imports for itself.
    """

    run: Run
    facts: WorkloadFacts
    beside: Beside
    warm: WarmUp
    deadline: Deadline
    import_seconds: float

    @property
    def device(self) -> Device:
        """What the workload trains on."""
        return Device.GPU if self.warm.started.gpus else Device.CPU


def open_run(
    trials: Trials,
    *,
    directory: RunDirectory,
    machine: Machine,
    reference: WorkloadReference,
    budget: float,
    seed: int,
    bracketed: bool,
    clock: Clock,
    observe: Observer,
    interruptions: Callable[[], int],
    earlier: Earlier | None = None,
    spent_before: float = 0.0,
    check: Callable[[WorkloadFacts], None] = lambda facts: None,
) -> Opened:
    """Import the workload, start its baseline and time it.

    Args:
        trials: Where trials come from.
        directory: Where everything is written.
        machine: Where it runs.
        reference: The workload.
        budget: Seconds for everything.
        seed: Of the order of slices.
        bracketed: Never keep two processes alive at once.
        clock: Seconds that count for the budget.
        observe: Is told what happens.
        interruptions: How often the user has asked to stop.
        earlier: What an earlier invocation left; None for a new run.
        spent_before: Seconds of earlier invocations that do not count for the budget.
        check: Looks at the workload once it is imported.

    Raises:
        WorkloadError: The workload itself is at fault.
        BudgetError: The budget does not hold the baseline.
        NoStableConfigurationError: The baseline fails.
    """
    observe(Began(text="importing the workload"))
    opening = clock()
    facts = trials.open()
    import_seconds = clock() - opening
    if earlier is not None:
        refuse_another_workload(earlier, fingerprint=facts.fingerprint)
    check(facts)
    tell_isolation(trials, observe)
    known = [] if earlier is None else earlier.trials()
    run = Run(
        directory=directory,
        trials=trials,
        clock=clock,
        observe=observe,
        interruptions=interruptions,
        rng=random.Random(seed),
        baseline=baseline_of(facts, reference, Device.GPU if machine.gpus else Device.CPU, observe),
        records={} if earlier is None else dict(earlier.records),
        numbers=itertools.count(0 if earlier is None else earlier.next_number),
        spent_before=spent_before,
    )
    deadline = Deadline(clock=clock, at=budget - CLOSING_SECONDS + OVERRUN_SHARE * budget)
    beside = Beside(run, deadline, bracketed=bracketed)
    longest = max(BASELINE_SECONDS, BASELINE_SHARE * budget)
    warm = beside.start_baseline(max(1.0, min(longest, budget - clock())), known[0] if known else None)
    device = Device.GPU if warm.started.gpus else Device.CPU
    tell_what_is_odd(facts, warm, device, beside.baseline.slices, observe)
    forked = isolation_of(trials, "template") == "template"
    return Opened(
        run=run,
        facts=facts,
        beside=beside,
        warm=warm,
        deadline=deadline,
        import_seconds=import_seconds if forked else 0.0,
    )


def isolation_of(trials: Trials, asked_for: str) -> str:
    """How trials are kept apart: as was asked for, unless importing the workload leaves no choice."""
    return str(getattr(trials, "isolation", asked_for))


def baseline_of(
    facts: WorkloadFacts, reference: WorkloadReference, device: Device, observe: Observer
) -> Configuration:
    """What the user would run anyway, as far as can be told before anything was built."""
    where = str(reference)
    refuse_knobs_that_cannot_act(facts, where=where)
    named = baseline_configuration(
        facts.batch_size, facts.baseline, device, where=f"{where}: Workload(baseline=…)"
    )
    baseline, notices = as_imported(named, facts, where=where)
    for text in notices:
        observe(Notice(text=text))
    return baseline


def tell_what_is_odd(
    facts: WorkloadFacts, warm: WarmUp, device: Device, slices: Sequence[Slice], observe: Observer
) -> None:
    """A word for each thing of the baseline that the timing leaves out, or that makes it unstable."""
    for text in (*oddities(facts, warm, device), *instabilities(slices)):
        observe(Notice(text=text))


def tell_isolation(trials: Trials, observe: Observer) -> None:
    """A word where importing the user's file starts what no fork survives."""
    started = trials.started_by_import
    if started is not None:
        what = {"runtime": "TensorFlow's runtime", "cuda": "CUDA", "threads": "threads"}[started]
        move = "whatever starts them" if started == "threads" else "tensors, datasets and device queries"
        observe(
            Notice(
                text=f"importing the workload's file starts {what}, so every trial gets a fresh interpreter, "
                f"which costs an import each; move {move} into functions to avoid it"
            )
        )


class Interruptions:
    """How often the user has asked to stop: by Ctrl-C or SIGTERM.

    Args:
        answerable: Whether something was measured that the run can end with. Before, a request stops the run at once.
    """

    def __init__(self, *, answerable: bool = False) -> None:
        self.answerable = answerable
        self.count = 0

    def __call__(self) -> int:
        """The requests so far."""
        return self.count


@contextlib.contextmanager
def interruptions_noted(observe: Observer, answer: str) -> Iterator[Interruptions]:
    """Count Ctrl-C and SIGTERM: the first ends the run with the verdict it has, the second raises `KeyboardInterrupt`.

    The first raises as well while nothing is answerable. It is acknowledged by a thread, because a signal's handler may
    run in the midst of printing.

    Args:
        observe: Is told of the first.
        answer: What it is told.
    """
    interruptions = Interruptions()
    if threading.current_thread() is not threading.main_thread():
        yield interruptions  # signals reach the main thread only; its owner decides
        return
    reading, writing = os.pipe()

    def acknowledge() -> None:
        if os.read(reading, 1) == b"!":
            observe(Notice(text=answer))

    def note(number: int, frame: object) -> None:
        interruptions.count += 1
        if interruptions.count > 1 or not interruptions.answerable:
            raise KeyboardInterrupt
        os.write(writing, b"!")

    thread = threading.Thread(target=acknowledge, daemon=True)
    thread.start()
    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruptions
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        os.write(writing, b".")
        thread.join()
        os.close(reading)
        os.close(writing)
