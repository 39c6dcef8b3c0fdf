"""Runs a script once, without side effects, to find out how it trains and which knobs reach it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from autotune.data.errors import WorkloadError
from autotune.data.facts import Fit, ScriptSettings, Site, WorkloadFacts, WorkloadReference
from autotune.data.printable import plural
from autotune.recipe import apply
from autotune.recipe.keras_api import KERAS_PACKAGES, keras_api
from autotune.recipe.tf_private import keras
from autotune.runtime import containment, failures, protocol
from autotune.runtime.failures import locate_user_line
from autotune.runtime.fork_server import Output, WaitingProcess
from autotune.runtime.sources import directory_of, file_of, own_files
from autotune.runtime.supervisor import exit_now, run_in_fork, send_answer
from autotune.script import children, strategies
from autotune.script.call_sites import count_method_calls, is_called_in_loop, with_line
from autotune.script.eager_steps import EagerSteps
from autotune.script.execute import edit_trees
from autotune.script.fit_call import FitCall, few_steps, settle_steps
from autotune.script.inline_steps import move_inline_steps
from autotune.script.interpose import Hooks, Wrappers
from autotune.script.loop_watch import LoopWatch
from autotune.script.reach import ScriptContext, facts_of_fit, facts_of_loop
from autotune.script.sandbox import SideEffects
from autotune.script.settings import Settings
from autotune.script.strategies import refuse_strategies
from autotune.script.trial import FitTraining, make_no_training_error, run_users
from autotune.space.configuration import Configuration
from autotune.space.keras_in_use import keras_in_use, keras_of, use_keras
from autotune.space.variables import caches_in

LOOP_STEPS, UPDATES, ROUNDS, ROUND_SECONDS = 3, 5, 2, 5
"""Steps after which enough is known of a loop; updates, or rounds of several functions, where it reads no dataset and
its work may vary; and the seconds in which these are awaited."""
Found = TypeVar("Found")
MOST_FAILED_FITS = 3  # of a script that retries for ever
MOST_FITS, LONGEST_SECONDS = 10, 60.0
"""Calls of `fit` that are surveyed, and the time after which no further one is."""
REPEATED_SECONDS, UNSEEN_SECONDS = 3.0, 20.0
"""Seconds after the tuned `fit` from which a loop's next call of it ends the survey; more where others may follow."""
NEGLIGIBLE = 0.01
"""Share of a call of `fit`, up to which the time before the next call need not be measured."""


def survey(
    reference: WorkloadReference,
    variables: dict[str, str],
    leave_template: Callable[[], None],
    tell: Callable[[str], object] = str,
) -> tuple[WorkloadFacts, WaitingProcess | None]:
    """Run the script in a fork of this process, and return its facts.

    Return also the fork, where it waits at the script's training to go on as the first trial. `tell` is called with
    what the script does meanwhile.

    Raises:
        WorkloadError: It cannot be tuned; the message says why, and what to do.
        MemoryError: Memory ran out.
    """
    gc.collect()
    gc.freeze()  # as before trials are forked: the collector would slow down the one that the survey becomes
    ours, theirs = map(protocol.Channel, socket.socketpair())

    def run(workers: int = 0) -> dict[str, Any]:
        began = time.perf_counter()

        def run_script(pipe: int) -> None:
            containment.renew(more_later=True)
            leave_template()
            ours.close()
            survey = Survey(reference, variables, pipe, workers, began=began, requests=theirs)
            make_steps_functions(reference)
            with survey.watching():
                run_users(reference)
            exit_now(1)

        return run_in_fork(run_script, keep_alive_key="waiting", on_progress=tell)

    with contextlib.closing(theirs):
        found = run()
        if workers := found.get("workers"):
            found = run(workers)
    if "facts" in found:
        facts, waiting = WorkloadFacts.model_validate(found["facts"]), found.get("waiting")
        if waiting is not None:
            waiting = WaitingProcess(pid=waiting, channel=ours, suits=partial(_keeps_values, facts))
        return facts, waiting
    if found.get("no_memory"):
        raise MemoryError(found["message"])
    raise WorkloadError(
        found.get("message") or f"{reference.shown} ended the process before it trained",
        hint=found.get("hint")
        or f"Check that it runs by itself: {'all cells of ' if reference.is_notebook else 'python '}{reference.shown}",
        detail=found.get("detail", ""),
    )


def make_steps_functions(reference: WorkloadReference) -> None:
    """Have the script, which has not begun, make functions of its inline steps: some of them can be compiled."""
    files = own_files(file_of(reference), Path(directory_of(reference)))
    edit_trees(move_inline_steps, {file.resolve() for file in files})


def _keeps_values(facts: WorkloadFacts, request: protocol.TrialRequest) -> bool:
    """Return whether a trial runs the script up to its training as the survey did: with the script's own values."""
    assert facts.script is not None
    configuration = Configuration(request.configuration)
    changes = Settings.from_configuration(configuration, facts.script).changes
    return not changes and configuration.get("strategy", "none") == "none" and request.losses is None


class Survey(Hooks):
    """One run of a script, up to its only training or to the end of its trainings.

    `variables`: what it sets before it imports TensorFlow. `pipe`: for the facts. `workers`: how many train
    together. `environment`: before the script ran; by default this process's. `began`: when this process was forked, by
    `perf_counter`; by default now. `requests`: brings the request of the first trial; None where it goes on as none.
    """

    def __init__(
        self,
        reference: WorkloadReference,
        variables: dict[str, str],
        pipe: int,
        workers: int = 0,
        *,
        environment: dict[str, str] | None = None,
        began: float | None = None,
        requests: protocol.Channel | None = None,
    ) -> None:
        self._reference, self._pipe, self._workers = reference, pipe, workers
        self._requests, self._output = requests, Output()
        self._trial: FitTraining | None = None  # that this process goes on as
        self._number = 0  # of this worker
        self._wanted = (reference.script or ScriptSettings()).fit
        directory = directory_of(reference)
        own = own_files(file_of(reference), Path(directory))
        self._repeats = is_called_in_loop(own, "fit")
        self._calls = count_method_calls(own, "fit")
        self._fits: list[Fit] = []
        self._keys: list[object] = []  # of their call sites
        self._facts: list[WorkloadFacts] = []
        self._failed_fits: list[tuple[Site, WorkloadFacts]] = []  # calls of `fit` that raised when cut short
        self._effects = SideEffects(reference, self._refuse)
        self._wrappers = Wrappers(Settings(), self, directory, self._effects.scratch)
        self._compiled = self._effects.scratch / f"compiled-{os.getpid()}"  # what XLA compiles in the first trial
        self._watch = LoopWatch(self._wrappers, eager=EagerSteps(directory))
        self._around = ScriptContext(
            reference=reference,
            variables=variables,
            wrappers=self._wrappers,
            effects=self._effects,
            environment=dict(os.environ) if environment is None else environment,
            workers=workers,
        )
        self._began = time.perf_counter() if began is None else began
        self._fits_ended_at: list[float] = []
        self._steps = 0
        self._counts_rounds = False  # a step is a round of several optimizers
        self._of_loop: dict[str, Any] | None = None  # the answer, if no further function of the step is called
        self._of_single: dict[str, Any] | None = None  # the answer where each call is a step

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Survey the script that runs meanwhile, answer, and end this process."""
        import tensorflow as tf

        children.watch_children(self._pipe)
        before = children.refuse_restarts(self._reference, self._refuse)  # before files are watched
        if self._requests is not None:  # TensorFlow reads the flags once, long before the first trial asks for a folder
            for environment in (os.environ, self._around.environment):  # alike: this is no doing of the script's
                environment.update(caches_in(str(self._compiled), environment, "shared"))
        try:
            if self._workers:
                self._number = strategies.start_workers(self._workers, lambda why: self._fail(WorkloadError(why)))
            else:
                apply.apply_before_build({})  # as in a trial: a GPU's memory is taken as it is needed
            self._effects.install(tf)
            self._watch.install(tf)
            self._wrappers.install()
            refuse_strategies(tf, self._refuse)
            if self._workers:
                strategies.keep_own_config(tf)
            else:
                strategies.before_strategy(tf, self._look_for_workers)
            tf.compat.v1.Session.__init__ = self._refuse_session
            before.update(os.environ)
            yield
        except BaseException as error:
            if not self._has_wanted_fit:
                self._fail(error)
        if self._number:  # worker 0 answers
            signal.pause()
        if not self._facts:
            self._fail(make_no_training_error(self._reference))
        self._end()

    def imported(self, name: str) -> None:
        """See `Hooks`: a script may import either Keras, or both."""
        if name in KERAS_PACKAGES:
            self._effects.install_keras(sys.modules[name])
            self._watch.install_keras(sys.modules[name], layers=True)

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """See `Hooks`."""
        use_keras(keras_of(model) or keras_in_use())
        if self._of_loop is not None:
            self._answer_with(self._of_loop)
        if self._workers > 1:
            workers = "a MultiWorkerMirroredStrategy of several workers"
            why = f"{site}, under {workers}, cannot be tuned; in Keras 3 it fails (keras#20585)"
            hint = "Train by a loop with strategy.run, which does work, or tune one worker: leave TF_CONFIG out."
            self._fail(WorkloadError(why, hint=hint))
        if children.is_child():
            children.refuse_training()
        number, began = len(self._fits) + 1, time.perf_counter()
        if self._around.before_seconds is None:
            self._around.before_seconds = began - self._began
        self._end_if_known(site, began)
        doing = f"call {number} of {site}"
        callbacks = self._effects.without_writers(arguments["callbacks"])
        call = FitCall(model=model, arguments=arguments, settings=self._wrappers.settings)
        tunes_steps = keras_api().tunes_steps(model)
        if tunes_steps:
            self._find(partial(settle_steps, call, usual, callbacks))
        facts = self._find(partial(facts_of_fit, call, number, site, self._around, tunes_steps=tunes_steps))
        if not self._repeats and (self._wanted == number or (self._wanted is None and self._calls <= 1)):
            self._note(site, facts, 0.0)
            # Keras starts workers once for an epoch: those that the survey has started would hang its second reader.
            if self._workers or self._requests is None or call.has_workers or tunes_steps:
                self._end()
            return self._go_on(self._requests, call, usual, ran_seconds=began - self._began)
        send_answer(self._pipe, {"doing": doing})
        ends: list[float] = []
        clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
        try:
            history = few_steps(model, usual, arguments, [*callbacks, clock])
        except Exception:
            self._failed_fits.append((site, facts))
            if len(self._failed_fits) < MOST_FAILED_FITS:
                raise  # the script may try again with less
            self._note(*self._failed_fits[0], 0.0)
            self._end()
        step_seconds = min((after - before for before, after in pairwise(ends)), default=0.0)
        dataset, _ = call.training_dataset
        examples = call.examples(dataset)
        steps = examples // facts.batch_size if examples else int(dataset.cardinality())
        self._note(site, facts, max(1, call.epochs) * max(1, steps) * step_seconds)
        self._fits_ended_at.append(time.perf_counter())
        was_last = not self._repeats and len(set(self._keys)) >= self._calls  # what follows may be a save or an upload
        if was_last or number >= MOST_FITS or time.perf_counter() - self._began > LONGEST_SECONDS:
            self._end()
        send_answer(self._pipe, {"doing": f"what follows {doing}"})
        return history

    def _end_if_known(self, site: Site, now: float) -> None:
        """Answer if a loop comes round to the tuned `fit`, and what lies between its calls takes long."""
        if not self._repeats or not self._has_wanted_fit or self._keys[self._tuned - 1] != site.key:
            return
        first = self._keys.index(site.key)
        longest = REPEATED_SECONDS if self._wanted or len(set(self._keys)) >= self._calls else UNSEEN_SECONDS
        if now - self._fits_ended_at[first] >= longest:
            self._note(site, self._facts[first], self._fits[first].planned_seconds)
            self._fits_ended_at.append(now)
            self._end()

    def _go_on(
        self, requests: protocol.Channel, call: FitCall, usual: Callable[..., Any], *, ran_seconds: float
    ) -> Any:
        """Answer, wait for the request of the first trial, and go on as that trial."""
        facts = self._choose_facts()
        send_answer(self._pipe, {"facts": facts.model_dump(mode="json"), "waiting": os.getpid()})
        # A child that trains from now on finds a socket here. It cannot open that, and ends alone.
        os.dup2(requests.fileno(), self._pipe)
        children.stop_watching()
        self._watch.uninstall()
        assert facts.script is not None
        call.settings.own.update(facts.script.baseline)
        try:
            request, channel = requests.receive(), protocol.Channel(requests.receive_end())
            requests.send(protocol.Forked(pid=os.getpid(), ran_seconds=ran_seconds))
        except protocol.ChannelClosed:  # another trial was the first
            exit_now(1)
        assert isinstance(request, protocol.TrialRequest)
        configuration = Configuration(request.configuration)
        self._trial = FitTraining(request, channel, configuration, facts.script, self._reference)
        self._trial.effects = self._effects
        try:
            self._output.move_to(request.log, request.folders)
            if request.timing.compiled_use == "shared":
                self._compiled.parent.mkdir(exist_ok=True)
                self._compiled.symlink_to(request.timing.compiled)
        except OSError as error:
            self._trial.fail(error)
        return self._trial.time(call, usual)

    def _note(self, site: Site, facts: WorkloadFacts, seconds: float) -> None:
        self._facts.append(facts)
        self._keys.append(site.key)
        self._fits.append(Fit(line=f"{site.file}, line {site.line}", site=site, planned_seconds=seconds))

    def stepped(self, examples: int, logs: Any) -> None:
        """See `Hooks`: a few steps are enough."""
        if children.is_child() and not self._number:
            children.refuse_training()
        self._steps += 1
        if self._around.before_seconds is None:
            self._around.before_seconds = (self._watch.read_at or time.perf_counter()) - self._began
        few = LOOP_STEPS if self._watch.dataset is not None else UPDATES
        for optimizer in self._watch.optimizers.values():
            use_keras(keras_of(optimizer) or keras_in_use())
        if self._steps < few or self._wanted is not None or self._number:
            return
        eager, is_known = self._watch.eager, self._of_loop is not None
        if is_known and eager is not None and not eager.are_all_seen:
            return
        if is_known and self._watch.by_call and not self._counts_rounds:
            self._counts_rounds, self._of_single = True, self._of_loop
            self._watch.updaters, self._watch.work = len(self._watch.optimizers), [0]
        with self._wrappers.inert():
            facts = self._find(partial(facts_of_loop, self._watch, examples, self._around))
        self._of_loop = {"facts": facts.model_dump(mode="json")}
        if (eager is None or eager.are_all_seen) and (not self._counts_rounds or len(self._watch.work) > ROUNDS):
            self._answer_with(self._of_loop)
        if threading.current_thread() is not threading.main_thread():  # no alarm can be set
            self._answer_with(self._of_loop)
        if not is_known:
            signal.signal(signal.SIGALRM, lambda *_: self._answer_late())
            signal.alarm(ROUND_SECONDS)

    def _answer_late(self) -> None:
        """Answer by what was seen; without a whole round of several functions each call is a step."""
        has_round = not self._counts_rounds or len(self._watch.work) > 1
        self._answer_with((self._of_loop if has_round else self._of_single) or {})

    def loops_inside(self, function: Site) -> None:
        """See `Hooks`."""
        if self._wanted is None:
            what = f"{function.function} loops over a dataset inside a tf.function"
            why = f"{function.file}, line {function.line}: {what}, so autotune cannot observe its steps"
            hint = "Loop over the dataset in Python, and let the tf.function train on one batch."
            self._refuse(WorkloadError(why, hint=hint))

    @property
    def _has_wanted_fit(self) -> bool:
        """True if the script has called the `fit` that is to be tuned."""
        return len(self._fits) >= (self._wanted or 1)

    def _find(self, find: Callable[[], Found]) -> Found:
        try:
            return find()
        except BaseException as error:
            self._fail(error)

    def _end(self) -> NoReturn:
        """Answer with the facts of the tuned `fit`."""
        self._answer_with({"facts": self._choose_facts().model_dump(mode="json")})

    @property
    def _tuned(self) -> int:
        """The number of the `fit` that was asked for, else of the longest so far."""
        planned: defaultdict[object, float] = defaultdict(float)
        for key, fit in zip(self._keys, self._fits, strict=True):  # a `fit` in a loop over folds counts as a whole
            planned[key] += fit.planned_seconds
        seconds = [planned[key] for key in self._keys]
        return self._wanted or seconds.index(max(seconds)) + 1

    def _choose_facts(self) -> WorkloadFacts:
        """Return the facts of the longest `fit`, or of the one that was asked for."""
        number = self._tuned
        if number > len(self._fits):
            lines = ", ".join(fit.line for fit in self._fits)
            why = f"--fit {number}: {self._reference.shown} has {plural(len(self._fits), 'call')} of fit ({lines})"
            hint = f"Give a number from 1 to {len(self._fits)}, or leave --fit out to tune the longest."
            self._fail(WorkloadError(why, hint=hint))
        chosen, own = self._facts[number - 1], self._around.own_files
        assert chosen.script is not None
        same = [index for index, key in enumerate(self._keys) if key == self._keys[number - 1]]
        calls = len(same)
        if len(same) > 1 and len(self._fits_ended_at) > same[1]:
            # These calls trained a few steps, so this is what lies between two of them at most.
            between = min(self._fits_ended_at[after] - self._fits_ended_at[before] for before, after in pairwise(same))
            calls = 1 if between < NEGLIGIBLE * self._fits[number - 1].planned_seconds else calls  # not worth timing
        script = chosen.script.model_copy(
            update={
                "fits": tuple(self._fits),
                "fit_calls": calls,
                "left_out": tuple(with_line(name, own, self._around.directory) for name in self._effects.left_out),
            }
        )
        return chosen.model_copy(update={"script": script})

    def _look_for_workers(self) -> None:
        """Answer with the number of workers that the strategy needs: the script is surveyed again with them."""
        if workers := strategies.workers_asked_for():
            self._answer_with({"workers": workers})

    def _refuse_session(self, *_: Any, **__: Any) -> None:
        why = f"{locate_user_line()}: opens a tf.compat.v1.Session, which cannot be tuned"
        self._refuse(WorkloadError(why, hint="Train by Keras, or by a loop with tf.GradientTape."))

    def _refuse(self, error: WorkloadError) -> NoReturn:
        if self._trial is not None:
            self._trial.fail(error)
        if self._has_wanted_fit:
            self._end()
        self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        failure = failures.encode_failure(error)
        answer = {"message": failure.reason, "hint": failure.hint, "detail": failure.detail}
        self._answer_with({**answer, "no_memory": failures.is_out_of_memory(error)})

    def _answer_with(self, answer: dict[str, Any]) -> NoReturn:
        signal.alarm(0)
        answer = answer if "facts" in answer else self._of_loop or answer
        if children.is_child() and not self._number:
            children.answer_for_parent(answer)
        send_answer(self._pipe, answer)
        exit_now(0)
