"""A trial on a seat of a Ray cluster, as the driver sees it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.data.record import Slice
from autotune.runtime import protocol
from autotune.runtime.executor import SeatLost, WarmUp
from autotune.runtime.logs import open_log

if TYPE_CHECKING:
    from autotune.runtime.ray_seats import ActorSeat, RayTrials

CLOSING_SECONDS = 20.0


class RayTrial:
    """A trial on another host; see `executor.LiveTrial`."""

    def __init__(self, trials: RayTrials, seat: ActorSeat, number: int, log: Path) -> None:
        self._trials, self._seat, self._number, self._log = trials, seat, number, log
        self._ended = False

    def warm_up(self, timeout_seconds: float) -> WarmUp:
        """See `executor.LiveTrial`."""
        answer: WarmUp = self._ask("warm_up", timeout_seconds, timeout_seconds)
        return answer

    def measure(self, seconds: float, timeout_seconds: float) -> Slice:
        """See `executor.LiveTrial`."""
        answer: Slice = self._ask("measure", timeout_seconds, seconds, timeout_seconds)
        return answer

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        """See `executor.LiveTrial`."""
        answer: tuple[Slice, ...] = self._ask("measure_continuously", timeout_seconds, seconds, count, timeout_seconds)
        return answer

    def finish(self, input_wait_seconds: float, timeout_seconds: float, *, thorough: bool = False) -> protocol.Finished:
        """See `executor.LiveTrial`."""
        asked = input_wait_seconds, timeout_seconds
        answer: protocol.Finished = self._ask("finish", timeout_seconds, *asked, thorough=thorough)
        self.kill()
        return answer

    def loss_curves(self, timeout_seconds: float) -> protocol.LossCurves:
        """See `executor.LiveTrial`."""
        answer: protocol.LossCurves = self._ask("loss_curves", timeout_seconds, timeout_seconds)
        self.kill()
        return answer

    def kill(self) -> None:
        """See `executor.LiveTrial`; its log and profile come to the driver."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(Exception):  # a seat that is lost has no files to give
            ended = self._seat.actor.end.remote(self._number)
            files: dict[str, bytes] = self._trials.answer(self._seat, ended, CLOSING_SECONDS)
            for name, held in files.items():
                if Path(name).is_absolute() or ".." in Path(name).parts:  # the host is another one
                    continue
                file = self._log if name == self._log.name else self._log.parent / name
                file.parent.mkdir(parents=True, exist_ok=True)
                with open(open_log(file) if file == self._log else file, "ab") as output:
                    output.write(held)

    def _ask(self, method: str, limit: float, *arguments: Any, **how: Any) -> Any:
        asked = self._seat.actor.ask.remote(self._number, method, arguments, how)
        try:
            return self._trials.answer(self._seat, asked, limit)
        except SeatLost:
            self._ended = True
            raise
        except BaseException:
            self.kill()
            raise
