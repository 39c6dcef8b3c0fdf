"""Runs a script once, with side effects off, to find out how it trains, and what a knob can reach."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import WorkloadError
from autotune.scripts import sources
from autotune.scripts.execute import answer_of, directory_of, file_of
from autotune.scripts.facts import Fit, ScriptSettings, Site
from autotune.scripts.fit_call import FitCall
from autotune.scripts.leaving import few_steps, leave
from autotune.scripts.loop_watch import LoopWatch
from autotune.scripts.reach import Around, facts_of_fit, facts_of_loop
from autotune.scripts.settings import Settings
from autotune.scripts.side_effects import SideEffects, effects_of
from autotune.scripts.trial import never_trains, run_users
from autotune.scripts.wrapping import Wrappers
from autotune.worker import failures
from autotune.workloads.users_errors import users_line
from autotune.workloads.workload import WorkloadFacts, WorkloadReference

LOOP_STEPS = 3
"""Of a loop of the script's own, after which enough is known of it."""
MOST_FITS, LONGEST_SECONDS = 10, 60.0
"""Of several `fit` calls so many are looked at, and none after so long."""


def survey(reference: WorkloadReference, variables: dict[str, str]) -> WorkloadFacts:
    """What the script does, by running it in a fork of this process.

    Raises:
        WorkloadError: It cannot be tuned; the message says why, and what to do.
        MemoryError: Memory ran out.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setpgid(0, 0)
        _Survey(reference, variables, writing).run()
    os.close(writing)
    told = json.loads(answer_of(pid, reading) or "{}")
    if "facts" in told:
        return WorkloadFacts.model_validate(told["facts"])
    if told.get("no_memory"):
        raise MemoryError(told["message"])
    message = told.get("message") or f"{reference.shown} ended the process before it trained"
    raise WorkloadError(
        message,
        hint=told.get("hint") or f"Check that it runs by itself: python {reference.shown}",
        detail=told.get("detail", ""),
    )


class _Survey:
    """One run of a script, up to the end of its trainings or to the only one."""

    def __init__(self, reference: WorkloadReference, variables: dict[str, str], answer: int) -> None:
        self._reference, self._variables, self._answer = reference, variables, answer
        self._settings = reference.script or ScriptSettings()
        self._file, self._directory = file_of(reference), directory_of(reference)
        self._files = sources.own_files(self._file, Path(self._directory))
        self._only = sources.calls_of(self._files, "fit") <= 1
        self._fits: list[Fit] = []
        self._facts: list[WorkloadFacts] = []
        self._began = time.monotonic()
        self._began_at = time.perf_counter()
        self._before: float | None = None
        self._effects: SideEffects
        self._wrappers: Wrappers
        self._watch: LoopWatch
        self._steps = 0

    def run(self) -> NoReturn:
        """Run the script, answer, and end this process."""
        import keras
        import tensorflow as tf

        try:
            self._effects = effects_of(self._reference, self._refuse)
            self._wrappers = Wrappers(Settings(), self, self._directory)
            self._wrappers.scratch = self._effects.scratch
            self._effects.install(tf, keras)
            self._wrappers.install()
            self._watch = LoopWatch(self._wrappers, self)
            self._watch.install(tf, keras)
            self._watch.watch_models(keras)
            tf.compat.v1.Session.__init__ = self._refuse_session
            run_users(self._reference)
        except BaseException as error:
            if not self._facts or self._settings.fit is not None:
                self._fail(error)
        if not self._facts:
            self._fail(self._no_fit())
        self._end()

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """See `wrapping.Hooks`."""
        number, wanted = len(self._fits) + 1, self._settings.fit
        if self._before is None:
            self._before = time.monotonic() - self._began
        callbacks = self._effects.kept(arguments["callbacks"])
        try:
            call = FitCall(model=model, arguments=arguments, settings=self._wrappers.settings)
            facts = facts_of_fit(call, number, site, self._around())
        except BaseException as error:
            self._fail(error)
        if wanted == number or (wanted is None and self._only):
            self._fits.append(Fit(line=_line(site), site=site, planned_seconds=0.0))
            self._facts.append(facts)
            self._end()
        clock = _Clock()
        history = few_steps(model, usual, arguments, [*callbacks, clock.callback()])
        steps = _steps(FitCall(model=model, arguments=arguments, settings=self._wrappers.settings), facts)
        epochs = max(1, int(arguments["epochs"]) - int(arguments["initial_epoch"]))
        self._fits.append(Fit(line=_line(site), site=site, planned_seconds=epochs * steps * clock.step_seconds))
        self._facts.append(facts)
        if number >= MOST_FITS or time.monotonic() - self._began > LONGEST_SECONDS:
            self._end()
        return history

    def _refuse_session(self, *_: Any, **__: Any) -> None:
        self._refuse(
            WorkloadError(
                f"{users_line(traceback.extract_stack())}: opens a tf.compat.v1.Session, which cannot be tuned",
                hint="Train by Keras, or by a loop with tf.GradientTape.",
            )
        )

    # ----------------------------------------------------------------------------------- a loop of its own

    def reads(self, dataset: Any) -> Any:
        """See `LoopHooks`."""
        return dataset

    def epoch_began(self) -> None:
        """See `LoopHooks`."""

    def epoch_ended(self) -> None:
        """See `LoopHooks`."""

    def stepped(self, examples: int, logs: Any) -> None:
        """See `LoopHooks`: after a few steps enough is known."""
        self._steps += 1
        if self._before is None:
            self._before = (self._watch.read_at or time.perf_counter()) - self._began_at
        if self._steps < LOOP_STEPS or self._settings.fit is not None:
            return
        try:
            with self._wrappers.inert():
                facts = facts_of_loop(self._watch, examples, self._around())
        except BaseException as error:
            self._fail(error)
        self._say({"facts": facts.model_dump(mode="json")})

    def _around(self) -> Around:
        return Around(
            name=self._file.stem if self._file.stem != "__main__" else self._file.parent.name,
            shown=self._reference.shown,
            file=str(self._file),
            directory=self._directory,
            fingerprint=sources.fingerprint(self._files),
            variables=self._variables,
            before_seconds=self._before or 0.0,
            left_out=tuple(self._effects.left_out),
            allow_cache=self._settings.allow_cache,
            wrappers=self._wrappers,
        )

    def _no_fit(self) -> WorkloadError:
        return never_trains(self._reference)

    def _end(self) -> NoReturn:
        """Answer with the longest `fit`, or the one that was asked for."""
        planned: dict[object, float] = {}
        for each in self._fits:  # a `fit` in a loop over folds or epochs counts as a whole
            key = each.site.key if each.site is not None else each.line
            planned[key] = planned.get(key, 0.0) + each.planned_seconds
        keys = [each.site.key if each.site is not None else each.line for each in self._fits]
        best = max(range(len(self._fits)), key=lambda each: (planned[keys[each]], -each))
        wanted = self._settings.fit
        if wanted is not None and wanted > len(self._fits):
            self._fail(
                WorkloadError(
                    f"--fit {wanted}: {self._reference.shown} calls fit {len(self._fits)} times",
                    hint=f"Give a number from 1 to {len(self._fits)}, or leave --fit out to tune the longest.",
                )
            )
        chosen = self._facts[best if wanted is None else wanted - 1]
        assert chosen.script is not None
        script = chosen.script.model_copy(update={"fits": tuple(self._fits), "left_out": tuple(self._effects.left_out)})
        self._say({"facts": chosen.model_copy(update={"script": script}).model_dump(mode="json")})

    def _refuse(self, error: WorkloadError) -> NoReturn:
        if self._facts and self._settings.fit is None:
            self._end()
        self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        told = failures.told(error)
        self._say(
            {
                "message": told.reason,
                "hint": told.hint,
                "detail": told.detail,
                "no_memory": failures.is_out_of_memory(error),
            }
        )

    def _say(self, told: dict[str, Any]) -> NoReturn:
        with open(self._answer, "wb") as stream:
            stream.write(json.dumps(told).encode() + b"\n")
        leave(0)


def _line(site: Site) -> str:
    return f"{site.file}, line {site.line}"


class _Clock:
    """Times the last of a few steps."""

    step_seconds = 0.0

    def callback(self) -> Any:
        """For `fit`."""
        import keras

        ends: list[float] = []
        clock = self

        class Ends(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                ends.append(time.perf_counter())
                clock.step_seconds = ends[-1] - ends[-2] if len(ends) > 1 else 0.0

        return Ends()


def _steps(call: FitCall, facts: WorkloadFacts) -> int:
    """Steps of an epoch; 1 where nothing tells."""
    dataset, _ = call.training_dataset()
    examples = call.examples(dataset)
    return max(1, examples // facts.batch_size) if examples else max(1, int(dataset.cardinality()))
