"""Ctrl-C, SIGQUIT, SIGTERM and a closing terminal: the first ends a run with its verdict, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from autotune.tuning.events import Notice, Observer


class Interruptions:
    """How often the user has asked to stop."""

    def __init__(self, *, answerable: bool = False) -> None:
        self.answerable = answerable  # something was measured that the run can end with; else it stops at once
        self.count = 0

    def __call__(self) -> int:
        """The requests so far."""
        return self.count


@contextlib.contextmanager
def interruptions_noted(observe: Observer, answer: str) -> Iterator[Interruptions]:
    """Count Ctrl-C, SIGQUIT, SIGTERM and, but for `nohup`, SIGHUP; the first answerable one raises nothing."""
    # A thread acknowledges the first, because a signal's handler may run in the midst of printing.
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
    noted = [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        noted.append(signal.SIGHUP)
    before = {each: signal.signal(each, note) for each in noted}
    try:
        yield interruptions
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        os.write(writing, b".")
        thread.join()
        os.close(reading)
        os.close(writing)
