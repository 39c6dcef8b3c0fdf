"""Recognise a port, lock file or device that the live baseline holds and that only one process may have."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autotune.data.printable import first_line
from autotune.data.record import Outcome, Pairing, Phase, TrialRecord
from autotune.space.configuration import Configuration
from autotune.tuning.events import Notice
from autotune.tuning.run import Run
from autotune.tuning.seat import Seat

FEWEST_FAILURES = 3  # failures for one reason, before anything is made of it
_BUILDING = "while building"  # in a timeout's reason: the configuration has not acted on anything yet


class ExclusiveResources:
    """Run trials without the live baseline if all of them fail with the same error beside it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._beside: list[TrialRecord] = []  # what failed beside the baseline, for the reason tested last
        self._alone: Configuration | None = None  # what runs without the baseline, to find out
        self._tested: set[str] = set()

    def judge(self, record: TrialRecord, seat: Seat) -> tuple[list[Configuration], str]:
        """Return the configurations to run again, and why the search cannot continue; empty if it can."""
        run = self._run
        asked = _requested(record)
        if (tested := asked == self._alone) and record.outcome.measured:
            self._alone = None
            run.observe(
                Notice(text="the trial succeeds without the baseline: from now on only one process runs at a time")
            )
            return [_requested(failed) for failed in self._beside if _requested(failed) != asked], ""
        same = find_same_failures(record, run.records.values())
        if len(same) < FEWEST_FAILURES or len(run.executor.seats) > 1:
            return [], ""
        reason = first_line(record.reason)
        if not seat.bracketed and failure_key(record) not in self._tested:
            self._tested.add(failure_key(record))
            self._beside, self._alone, seat.bracketed = same, asked, True
            text = f"{len(same)} trials failed with the same error while the baseline was running: {reason}"
            held = "The baseline may hold a port, a lock file or a device; repeating the last trial without it"
            run.observe(Notice(text=f"{text}. {held}"))
            return [asked], ""
        if tested:
            self._alone, seat.bracketed = None, False
        measured = any(known.outcome.measured for known in run.records.values() if known.phase is Phase.SEARCH)
        if measured or have_a_change_in_common(same, run.baseline):
            return [], ""
        log = run.directory.trial_directory(record.trial) / "log.txt"
        return (
            [],
            f"{len(same)} trials failed with the same error, with and without the baseline: {reason} (see {log})",
        )


def failure_key(record: TrialRecord) -> str:
    """Return what equal failures have in common; empty where a failure may be the configuration's own."""
    reason = first_line(record.reason)
    if record.outcome is Outcome.TIMEOUT and _BUILDING in reason:
        return re.sub(r"\d+\.\d+ s", "", reason)
    return reason if record.outcome in (Outcome.ERROR, Outcome.CRASHED) else ""


def find_same_failures(last: TrialRecord, records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the search's trials that failed like the last one; none where one was measured beside the baseline."""
    searched = [record for record in records if record.phase is Phase.SEARCH]
    beside = any(record.outcome.measured and record.pairing is Pairing.ALTERNATING for record in searched)
    key = failure_key(last)
    return [record for record in searched if failure_key(record) == key] if key and not beside else []


def have_a_change_in_common(failed: Iterable[TrialRecord], baseline: Configuration) -> bool:
    """Return whether all these trials changed one knob of the baseline to one value, which may be why they failed."""
    return bool(set.intersection(*(set(record.configuration.items()) - set(baseline.items()) for record in failed)))


def _requested(record: TrialRecord) -> Configuration:
    return Configuration(record.asked or record.configuration)
