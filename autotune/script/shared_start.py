"""Run a script's start once for all trials: up to its first call of TensorFlow's runtime, where trials are forked.

The start ends before a call that starts the runtime, and before one that trials or the survey change: what they wrap is
wrapped in the forks. A start that is short, or that leaves something which no fork can have, is not shared: then each
trial runs the script from its first line.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from autotune.data.facts import WorkloadFacts, WorkloadReference
from autotune.recipe.keras_api import KERAS_PACKAGES, api_of
from autotune.recipe.tf_private import runtime_starts
from autotune.runtime import containment, failures, protocol, supervisor
from autotune.runtime.failures import after_import, locate_user_line
from autotune.runtime.fork_server import ForkCheck, ForkServer, ForkState, Unforkable
from autotune.runtime.sources import directory_of, file_of, own_files
from autotune.runtime.supervisor import exit_now, fork_and_collect, send_answer
from autotune.script import children, strategies
from autotune.script.execute import make_endless, note_process
from autotune.script.interpose import around
from autotune.script.sandbox import SideEffects
from autotune.script.settings import serve_script
from autotune.script.survey import Survey, make_steps_functions
from autotune.script.trial import prepare, run_users, timing
from autotune.space.configuration import Configuration
from autotune.space.keras_in_use import use_keras

SHORTEST_SECONDS = 1.0  # of a start that is worth sharing


def share_start(
    reference: WorkloadReference, variables: dict[str, str], server: ForkServer, pipe: int, *, known: bool
) -> str:
    """Run the script up to its first call of TensorFlow's runtime, survey it unless it is known, and serve there.

    Return why trials are not forked there; empty where the script ends or fails before, which its survey will report.
    """
    import tensorflow as tf

    starts = runtime_starts()
    if not starts or os.environ.get(strategies.VARIABLE):
        return ""
    start = _Start(reference, variables, server, pipe, known=known)
    children.watch_children(pipe)
    children.refuse_restarts(reference, lambda _: start.give_up(""))  # the survey says it
    effects = SideEffects(reference, lambda _: None)
    effects.install(tf)
    if (bars := getattr(sys.modules.get("tqdm"), "tqdm", None)) is not None:
        bars.monitor_interval = 0  # without its thread, which redraws bars that stand still
    serve_script(on_access=start.end)
    # And the calls that a survey or trial wraps, as far as they are possible without a layer or tensor.
    wrapped = (tf.compat.v1.Session, tf.distribute.MultiWorkerMirroredStrategy, *dict(strategies.refused_kinds(tf)))
    start.stop_before(
        [*starts, (type(tf.function(lambda: None)), "__call__"), *((kind, "__init__") for kind in wrapped)]
    )
    for package in KERAS_PACKAGES:
        after_import(package, effects.install_keras)
        after_import(package, lambda keras: start.stop_before(api_of(keras).building_calls()))
    make_steps_functions(reference)
    with contextlib.suppress(Exception), start.role:
        run_users(reference, adjustable=True)
    if os.getpid() != start.process:  # a fork has ended its role by itself
        exit_now(1)
    return ""


class _Start:
    """The start of a script in this process, which becomes the server of its trials."""

    def __init__(
        self, reference: WorkloadReference, variables: dict[str, str], server: ForkServer, pipe: int, *, known: bool
    ) -> None:
        self._reference, self._variables, self._server = reference, variables, server
        self._pipe, self._known = pipe, known
        self.role = contextlib.ExitStack()  # of a fork: a survey or a trial, around the running script
        self.process = os.getpid()
        self._has_ended = False
        self._restores: list[Callable[[], object]] = []
        self._here, self._environment = os.getcwd(), dict(os.environ)
        self._check = ForkCheck()
        self._began = time.perf_counter()

    def stop_before(self, calls: Iterable[tuple[Any, str]]) -> None:
        """End the start before the first of these calls, unless it has ended."""
        for owner, name in () if self._has_ended else calls:
            self._restores.append(around(owner, name, functools.partial(self._stop, owner, name)))

    def _stop(self, owner: Any, name: str, usual: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        self.end()
        return getattr(owner, name)(*arguments, **named)  # what this fork has put there

    def end(self) -> None:
        """Serve the driver from here. Returns in forks, which go on with the script."""
        if self._has_ended:
            return
        if os.getpid() != self.process:  # a process that the script has forked uses TensorFlow
            children.answer_for_parent({})
        self._has_ended = True
        try:
            for restore in reversed(self._restores):
                restore()
            self._become_server(self._examine())
        except BaseException as error:
            traceback.print_exc()
            why = f"{failures.summarize_error(error)} when {locate_user_line()}, starts TensorFlow"
            self.give_up(f"trials cannot share that, because {why}")

    def _examine(self) -> ForkState:
        """Return the state that forks must restore. Gives up where this process cannot or need not be forked."""
        self._seconds = time.perf_counter() - self._began
        line = locate_user_line()
        if threading.current_thread() is not threading.main_thread():
            self.give_up(f"trials cannot share that, because {line}, starts TensorFlow in a thread")
        if self._seconds < SHORTEST_SECONDS:
            advice = "move it below the data preparation, which then runs once for all trials"
            self.give_up(f"{line}, starts TensorFlow: {advice}")
        if os.environ.get(strategies.VARIABLE):
            self.give_up("")
        try:
            return self._check.state()
        except Unforkable as error:
            self.give_up(f"trials cannot share that, because {error} when {line}, starts TensorFlow")

    def _become_server(self, state: ForkState) -> None:
        """Survey the script, and serve the driver. Returns in forks, whose role has begun."""
        children.stop_watching()
        gc.freeze()  # keeps the collector from touching, and so copying, every page in each fork
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the script may have closed it
                stream.flush()
        facts: WorkloadFacts | None = None
        fork_result = fork_and_collect(on_progress=self._server.tell)
        if isinstance(fork_result, int):
            self._pipe = fork_result
            containment.renew()
            state.restore()
            if self._known:  # this fork only shows that trials can be forked
                send_answer(fork_result, {"facts": None})
                exit_now(0)
            note_process()
            survey = Survey(self._reference, self._variables, fork_result, environment=self._environment)
            self.role.enter_context(survey.watching())
            return
        if "facts" not in fork_result:
            why = fork_result.get("message", "the script died")
            self.give_up(fork_result.get("reason") or f"trials cannot share that, because in a fork of it {why}")
        if not self._known:
            facts = WorkloadFacts.model_validate(fork_result["facts"])
            assert facts.script is not None
            script = facts.script.model_copy(update={"shared_seconds": self._seconds})
            facts = facts.model_copy(update={"script": script})
        send_answer(self._pipe, {"serves": os.getpid()})
        try:
            self._server.control.send(protocol.TemplateReady(workload=facts))
            request, channel = self._server.serve(state)
        except protocol.ChannelClosed:
            supervisor.kill_orphans()
            exit_now(0)
        note_process()
        self.role.enter_context(_trial(request, channel, self._reference, self._here))

    def give_up(self, reason: str) -> NoReturn:
        """End this process, and say why to the one that has forked it, which goes on without it."""
        with contextlib.suppress(OSError):  # it serves already
            send_answer(self._pipe, {"reason": reason})
        exit_now(0)


@contextlib.contextmanager
def _trial(
    request: protocol.TrialRequest, channel: protocol.Channel, reference: WorkloadReference, here: str
) -> Iterator[None]:
    """Run one trial of the script that runs meanwhile, and end this process."""
    try:
        facts, configuration = request.script, Configuration(request.configuration)
        assert facts is not None
        use_keras(request.keras)
        prepare(configuration, facts)
        if facts.epochs_range is not None:
            make_endless(facts.epochs_range, reference)
        with timing(request, channel, reference, configuration, here):
            if not configuration.get("graph_step"):
                yield
                return
            own = own_files(file_of(reference), Path(directory_of(reference)))  # made without compiled files
            for name, module in list(sys.modules.items()):
                if name != "__main__" and Path(getattr(module, "__file__", None) or "") in own:
                    del sys.modules[name]
            os.chdir(here)
            run_users(reference, endless=facts.epochs_range)
    except protocol.ChannelClosed:
        exit_now(1)
    except BaseException as error:
        channel.send(failures.encode_failure(error))
        exit_now(1)
    exit_now(0)
