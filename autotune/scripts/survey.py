"""Runs a script once, with side effects off, to find out how it trains, and what a knob can reach."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from autotune.errors import WorkloadError
from autotune.recipe import apply
from autotune.recipe.apply import kind_of
from autotune.scripts import sources, tuned
from autotune.scripts.call_sites import enclosing_ranges
from autotune.scripts.chain import BATCHES, back_from, batch_calls, cacheable, calls_for
from autotune.scripts.execute import directory_of, file_of
from autotune.scripts.facts import Fit, ScriptFacts, ScriptSettings, Site, Trains
from autotune.scripts.fit_call import FitCall, honours_batch_size
from autotune.scripts.leaving import few_steps, leave
from autotune.scripts.loop_watch import LoopWatch
from autotune.scripts.settings import Settings
from autotune.scripts.side_effects import SideEffects, effects_of
from autotune.scripts.trial import never_trains, run_users
from autotune.scripts.wrapping import Wrappers
from autotune.space.knobs import AS_WRITTEN, KNOBS, Device, KnobValue, Stage
from autotune.worker import failures
from autotune.worker.datasets import batch_length
from autotune.worker.private_api import inputs_of
from autotune.workloads.users_errors import users_line
from autotune.workloads.workload import WorkloadFacts, WorkloadReference

ON_CHAIN = ("num_parallel_calls", "prefetch")
"""Knobs that are arguments of `tf.data` calls of the script's."""
UNLOCK = "autotune.tuned(batch_size=N) in the script gives it to code that computes with it"
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
    with open(reading, "rb") as stream:
        told = json.loads(stream.read() or "{}")
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has started
    if "facts" in told:
        return WorkloadFacts.model_validate(told["facts"])
    if told.get("no_memory"):
        raise MemoryError(told["message"])
    message = (
        told.get("message")
        or f"{reference.shown} ended the process (status {os.waitstatus_to_exitcode(status)})"
    )
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
        self._name = self._file.stem if self._file.stem != "__main__" else self._file.parent.name
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

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], line: str) -> Any:
        """See `wrapping.Hooks`."""
        number, wanted = len(self._fits) + 1, self._settings.fit
        if self._before is None:
            self._before = time.monotonic() - self._began
        callbacks = self._effects.kept(arguments["callbacks"])
        try:
            facts = self._found(model, arguments, number)
        except BaseException as error:
            self._fail(error)
        if wanted == number or (wanted is None and self._only):
            self._fits.append(Fit(line=line, planned_seconds=0.0))
            self._facts.append(facts)
            self._end()
        clock = _Clock()
        history = few_steps(model, usual, arguments, [*callbacks, clock.callback()])
        steps = _steps(FitCall(model=model, arguments=arguments, settings=self._wrappers.settings), facts)
        epochs = max(1, int(arguments["epochs"]) - int(arguments["initial_epoch"]))
        self._fits.append(Fit(line=line, planned_seconds=epochs * steps * clock.step_seconds))
        self._facts.append(facts)
        if number >= MOST_FITS or time.monotonic() - self._began > LONGEST_SECONDS:
            self._end()
        return history

    def _found(self, model: Any, arguments: dict[str, Any], number: int) -> WorkloadFacts:
        """What is known of a `fit`."""
        call = FitCall(model=model, arguments=arguments, settings=self._wrappers.settings)
        if call.kind == "generator" and not arguments["steps_per_epoch"]:
            raise WorkloadError(
                "fit() is given a generator without steps_per_epoch, so its data cannot be read twice",
                hint="Give fit() steps_per_epoch, or a keras.utils.PyDataset or tf.data.Dataset in place of it.",
            )
        dataset, _ = call.training_dataset()
        given = _baseline(call, dataset, self._wrappers)
        chain = dataset if call.kind == "dataset" else None
        sites = _sites(chain)
        uncached = self._cache(chain, given, sites)
        schedule = getattr(getattr(model, "optimizer", None), "_learning_rate", None)
        is_schedule = callable(schedule) and hasattr(schedule, "get_config")
        batch_size = int(given.pop("batch_size"))
        facts = ScriptFacts(
            trains=Trains.FIT,
            fit=number,
            baseline={**given, "batch_size": batch_size},
            sites=sites,
            not_reached=_unless_asked_for(_not_reached(call, dataset, sites) | uncached),
            left_out=tuple(self._effects.left_out),
            before_seconds=self._before or 0.0,
            epochs=int(arguments["epochs"]) - int(arguments["initial_epoch"]),
            schedule=type(schedule).__name__ if is_schedule else None,
            variables=self._variables,
            batch_given_as=str(sites["batch_size"][0]) if "batch_size" in sites else "",
        )
        return WorkloadFacts(
            name=self._name,
            batch_size=batch_size,
            baseline=given,
            batched=True,
            drop_remainder=call.drops_remainder(dataset),
            dataset_takes_config="num_parallel_calls" in sites,
            validates=arguments["validation_data"] is not None or bool(arguments["validation_split"]),
            fingerprint=sources.fingerprint(self._files),
            script=facts,
        )

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
                facts = self._found_loop(examples)
        except BaseException as error:
            self._fail(error)
        self._say({"facts": facts.model_dump(mode="json")})

    def _found_loop(self, examples: int) -> WorkloadFacts:
        import tensorflow as tf

        watch = self._watch
        dataset = watch.dataset if isinstance(watch.dataset, tf.data.Dataset) else None
        calls, why = (
            batch_calls(dataset) if dataset is not None else ([], "the script makes its batches itself")
        )
        given = runtime_knobs() | {"jit_compile": watch.jit_compile}
        sites = _sites(dataset)
        given |= {knob: _common([_as_knob(each) for each in _given(dataset, knob)]) for knob in ON_CHAIN}
        reasons = {"steps_per_execution": "a loop of its own calls each step by itself"}
        reasons["persistent_iterator"] = "a loop of its own makes its iterators itself"
        if watch.step_function is None:
            reasons["jit_compile"] = "no tf.function without a dataset or a strategy updates the weights"
        if why:
            reasons["batch_size"] = f"{why}; {UNLOCK}"
        if dataset is None:
            options = [name for name, knob in KNOBS.items() if knob.stage is Stage.OPTIONS]
            reasons |= dict.fromkeys(("prefetch", *options), "the training reads no tf.data.Dataset")
        if not sites.get("num_parallel_calls"):
            reasons["num_parallel_calls"] = "no map() or interleave() of the script's feeds the training"
        reasons |= self._cache(dataset, given, sites)
        batch_size = calls[0].given if calls else examples
        if not batch_size:
            raise WorkloadError(
                f"{self._reference.shown}: how many examples a step takes could not be seen",
                hint="Hand the batch to the step as its first argument.",
            )
        facts = ScriptFacts(
            trains=Trains.LOOP,
            baseline={**given, "batch_size": batch_size},
            sites=sites,
            not_reached=_unless_asked_for(reasons),
            left_out=tuple(self._effects.left_out),
            before_seconds=self._before or 0.0,
            variables=self._variables,
            batch_given_as=str(calls[0].site) if calls else "",
            step_function=watch.step_function,
            epochs_range=self._epochs_range(),
        )
        return WorkloadFacts(
            name=self._name,
            batch_size=batch_size,
            baseline=given,
            batched=True,
            drop_remainder=bool(calls and calls[0].drop_remainder),
            dataset_takes_config=bool(sites.get("num_parallel_calls")),
            validates=False,
            fingerprint=sources.fingerprint(self._files),
            script=facts,
        )

    def _cache(
        self, dataset: Any, given: dict[str, KnobValue], sites: dict[str, tuple[Site, ...]]
    ) -> dict[str, str]:
        """Make `cache` a knob where that is allowed and a map can be cached; why it is none otherwise."""
        if not self._settings.allow_cache:
            return {}
        site, why = (None, "the training reads no tf.data.Dataset") if dataset is None else cacheable(dataset)
        if site is None:
            return {"cache": why}
        given["cache"], sites["cache"] = False, (site,)
        return {}

    def _epochs_range(self) -> Site | None:
        """The `range()` that the loop over epochs runs by, where the script's own file has one."""
        place, lines = self._watch.place, []
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == str(self._file):
                lines.append(frame.f_lineno)
            frame = frame.f_back
        if place is not None and place[0] == str(self._file) and lines:
            lines[0] = place[1]  # where the data is read from its beginning
        found = [site for line in lines for site in enclosing_ranges(str(self._file), line, self._directory)]
        if not found:
            return None
        return found[0] if place is not None else found[-1]

    def _no_fit(self) -> WorkloadError:
        return never_trains(self._reference)

    def _end(self) -> NoReturn:
        """Answer with the longest `fit`, or the one that was asked for."""
        best = max(range(len(self._fits)), key=lambda each: self._fits[each].planned_seconds)
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
        script = chosen.script.model_copy(
            update={"fits": tuple(self._fits), "left_out": tuple(self._effects.left_out)}
        )
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
            stream.write(json.dumps(told).encode())
        leave(0)


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


def _baseline(call: FitCall, dataset: Any, wrappers: Wrappers) -> dict[str, KnobValue]:
    """The knobs as the script leaves them."""
    found = runtime_knobs()
    found["batch_size"] = call.batch_size or batch_length(dataset)
    found["jit_compile"] = wrappers.given.get("jit_compile", "auto")
    found["steps_per_execution"] = int(call.model.steps_per_execution)
    chain = dataset if call.kind == "dataset" else None
    found |= {knob: _common([_as_knob(each) for each in _given(chain, knob)]) for knob in ON_CHAIN}
    if call.kind == "py_dataset":
        x = call.arguments["x"]
        found |= {"workers": int(x.workers), "max_queue_size": int(x.max_queue_size)}
        found["use_multiprocessing"] = bool(x.use_multiprocessing)
    return found


def runtime_knobs() -> dict[str, KnobValue]:
    """The knobs that act before a model is built, as they are in force."""
    import tensorflow as tf

    device = Device.GPU if tf.config.list_physical_devices("GPU") else Device.CPU
    found = {name: value for name, value in apply.in_force().items() if device in KNOBS[name].devices}
    return {name: value for name, value in found.items() if value in KNOBS[name].domain}


def _given(dataset: Any, knob: str) -> list[Any]:
    return [] if dataset is None else [each.given for each in calls_for(dataset, knob)]


def _sites(dataset: Any) -> dict[str, tuple[Site, ...]]:
    """Where knobs reach the script's own calls that make a dataset."""
    if dataset is None:
        return {}
    calls = {knob: calls_for(dataset, knob) for knob in ON_CHAIN} | {"batch_size": batch_calls(dataset)[0]}
    found = {knob: {each.site.key: each.site for each in made} for knob, made in calls.items()}
    return {knob: tuple(each.values()) for knob, each in found.items() if each}


def _as_knob(given: Any) -> KnobValue:
    number = 0 if given is None else int(given)
    return "autotune" if number == -1 else number


def _common(values: list[KnobValue]) -> KnobValue:
    """What all calls were given; 0 without any."""
    if not values:
        return 0
    return values[0] if len(set(map(repr, values))) == 1 else AS_WRITTEN


def _not_reached(call: FitCall, dataset: Any, sites: dict[str, Any]) -> dict[str, str]:
    """The knobs that do not reach this training, and why."""
    import tensorflow as tf

    reasons: dict[str, str] = {}
    if call.kind == "dataset":
        _, why = batch_calls(dataset)
        if why:
            reasons["batch_size"] = f"{why}; {UNLOCK}"
        elif call.arguments["steps_per_epoch"] and not _per_batch(call, dataset):
            reasons["batch_size"] = f"steps_per_epoch is not the number of batches in the data; {UNLOCK}"
    elif call.kind == "py_dataset" and not honours_batch_size(call.arguments["x"]):
        reasons["batch_size"] = f"the PyDataset yields no other batches when its batch_size is set; {UNLOCK}"
    elif call.kind in ("generator", "distributed"):
        reasons["batch_size"] = f"the training data is a {call.kind}; {UNLOCK}"
    if "num_parallel_calls" not in sites:
        reasons["num_parallel_calls"] = "no map() or interleave() of the script's feeds the training"
    if call.kind == "arrays":
        reasons["prefetch"] = "Keras makes the batches of arrays, and prefetches them"
    if call.kind not in ("arrays", "dataset"):
        options = [name for name, knob in KNOBS.items() if knob.stage is Stage.OPTIONS]
        for name in ("prefetch", "persistent_iterator", *options):
            reasons[name] = f"the training data is a {call.kind}, and no tf.data.Dataset"
    if call.arguments["steps_per_epoch"]:
        reasons["persistent_iterator"] = "fit is given steps_per_epoch, and keeps its iterator already"
    if call.model.distribute_strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy():
        reasons["jit_compile"] = "XLA is not used under a tf.distribute strategy"
    return reasons


def _unless_asked_for(reasons: dict[str, str]) -> dict[str, str]:
    """What does not reach the training, but for what the script takes from `autotune.tuned`."""
    return {name: why for name, why in reasons.items() if name not in tuned.given}


def _per_batch(call: FitCall, dataset: Any) -> bool:
    """Whether `steps_per_epoch` is the number of batches that the data has."""
    size, steps = call.batch_size, int(call.arguments["steps_per_epoch"])
    batched = next((each for each in back_from(dataset) if kind_of(each) in BATCHES), None)
    if batched is None or not size:
        return False
    counts = (int(each.cardinality()) for each in back_from(inputs_of(batched)[0]))
    examples = next((each for each in counts if each >= 0), -1)
    return examples >= 0 and steps in (examples // size, -(-examples // size))
