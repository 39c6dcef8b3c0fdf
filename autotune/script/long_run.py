"""The long run: a script as it is, with a recipe's values in the places where it was tuned."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.data.errors import ApplyError, AutotuneError, RecipeError
from autotune.data.facts import Machine, ScriptFacts, Site, Trains, WorkloadReference
from autotune.data.files import make_scratch
from autotune.data.options import VERIFY_SECONDS, LongRunOptions, check_args
from autotune.data.record import Rule
from autotune.machine.fingerprint import describe_changes, fingerprint
from autotune.recipe import apply
from autotune.recipe.answer import describe_doubts
from autotune.recipe.compiled import load_compiled
from autotune.recipe.guard import LOG, Guard, guard_callback, say
from autotune.recipe.keras_api import api_of, refuse_other_keras
from autotune.recipe.learning_rate import ScaledTrainings, factor_of, scale_updates
from autotune.recipe.tf_private import keras, naming_callback
from autotune.runtime.sources import describe_frames, directory_of, file_of, fingerprint_of_script, own_files
from autotune.script import children
from autotune.script.call_sites import calls_in
from autotune.script.execute import run_as_main
from autotune.script.fit_call import FitCall
from autotune.script.graph_step import StepCompiler
from autotune.script.interpose import Hooks, Wrappers, around
from autotune.script.loading import parse_reference
from autotune.script.loop_watch import LoopWatch
from autotune.script.notebook import open_notebook
from autotune.script.sandbox import listed_callbacks
from autotune.script.settings import Settings
from autotune.script.strategies import open_when_building
from autotune.space.configuration import Configuration
from autotune.space.keras_in_use import use_keras
from autotune.space.knobs import KNOBS, Stage
from autotune.space.variables import loading_from
from autotune.training.gauges import Weights, count_parameters

if TYPE_CHECKING:
    from autotune.recipe.recipe import Recipe


def facts_in(recipe: Recipe, file: Path | None = None, shown: str = "") -> ScriptFacts:
    """Return a recipe's facts of its script. Raises `RecipeError` for the recipe of a `Workload` or of another file."""
    facts, known = recipe.workload.script, recipe.workload.name
    if facts is None:
        raise RecipeError(
            f"the recipe is of {known}, which was tuned as a Workload",
            hint="Use it in the training code: recipe.apply(), recipe.compile(model, …) and recipe.fit(model, data).",
        )
    if file is not None and known not in (file.stem, file.parent.name):
        raise RecipeError(
            f"the recipe is of {known}, and {shown} is another script", hint=f"Tune this one: autotune tune {shown}"
        )
    return facts


class LongRun(Hooks):
    """One process that trains by a recipe. Raises RecipeError for the recipe of a `Workload`."""

    def __init__(
        self,
        recipe: Recipe,
        path: Path,  # of the recipe's file; the guard's log lies beside it
        directory: str,  # the script's
        options: LongRunOptions,
        *,
        stale: Staleness | None = None,  # says what has changed since the recipe was measured
        compiled: Path | None = None,  # a folder with what XLA compiled then
    ) -> None:
        self._facts, self._keras = facts_in(recipe), recipe.workload.keras
        use_keras(self._keras)
        self._loop = self._facts.trains is Trains.LOOP
        tested = recipe.learning_rate_rule
        scale: Rule | None = options.scale_learning_rate
        self._is_tested = scale is None and tested is not None and tested.same_loss is not None
        if scale is None and tested is not None and tested.same_loss is not None and not options.keep_learning_rate:
            scale = tested.rule
        self._skip_missing, self._scale = options.skip_missing, scale
        self._stale, self._compiled = stale, compiled
        self._configuration = Configuration(recipe.configuration)
        self._settings = Settings.from_configuration(self._configuration, self._facts)
        self._wrappers = Wrappers(self._settings, self, directory)
        self._watch = LoopWatch(self._wrappers, self._facts, finds_compiled=compiled is not None)
        log = path.resolve().parent / LOG
        own = not os.path.lexists(log) or (log.is_file() and not log.is_symlink())  # the folder may be another user's
        log_file = log if own and os.access(log.parent, os.W_OK) else None
        fills_cache = bool(recipe.changes.get("cache"))
        self.guard = Guard(recipe.evidence, recipe.machine, log=log_file, fills_cache=fills_cache)
        self._checked_missing = False
        self._trainings: ScaledTrainings | None = None  # by `fit`, where the learning rate is scaled
        self._scaled = weakref.WeakKeyDictionary[Any, tuple[int, int]]()  # optimizers whose scaling was said
        self._said_last = ""  # of the learning rate

    def install(self, *, begun: bool = False) -> None:
        """Set what acts before TensorFlow is imported, and wrap it, now or once it is. `begun`: the script runs."""
        if begun and self._facts.sites.get("graph_step") and self._settings.changes.pop("graph_step", None):
            self._settings.changes.pop("jit_compile", None)
            say("graph_step has no effect: use `autotune run`, or paste the line of `autotune show --diff`")
        apply.apply_before_import(self._settings.changes)
        os.environ.update(apply.environment(self._settings.changes, Stage.START))
        if self._compiled is not None:
            os.environ.update(loading_from(str(self._compiled), os.environ))
        self._wrappers.install()
        if self._settings.changes.get("graph_step") and (steps := self._facts.sites.get("graph_step")):
            StepCompiler(steps, self._settings, self._wrappers.directory)

    def imported(self, name: str) -> None:
        """See `Hooks`: set what acts right after an import."""
        if name not in ("tensorflow", self._keras.package):
            self._refuse_loop_of(sys.modules[name])
            return
        tf, stage = sys.modules["tensorflow"], Stage.RUNTIME if name == "tensorflow" else Stage.BUILD
        for knob, value in self._settings.changes.items():
            if KNOBS[knob].stage is stage:
                KNOBS[knob].set(tf, value)
        if name == "tensorflow":
            return
        if self._loop:
            if self._scale is not None:
                scale_updates(self._factor_of_loop)
            self._watch.install(tf)  # outside, so that steps see the script's own rate
            self._watch.install_keras(sys.modules[name])
        else:
            if self._scale is not None:
                self._trainings = ScaledTrainings()
            open_when_building(self._configuration)

    def _refuse_loop_of(self, module: Any) -> None:
        """Refuse a loop that updates its weights with the other Keras: nothing of the recipe acts there."""
        if not self._loop:
            return

        def refuse(_: Any, optimizer: Any, *__: Any, **___: Any) -> None:
            try:
                refuse_other_keras(optimizer, self._keras)
            except ApplyError as error:  # a function that is being traced would hide its kind
                say(str(error))
                raise SystemExit(error.exit_code) from error

        api = api_of(module)
        for base in api.optimizer_bases():
            around(base, api.update_method, refuse)

    def ended(self) -> None:
        """Note that the script is over, and say how fast it trained."""
        if self._facts.work_varies:
            say("the speed is not compared: the work of a step changes with what was learned")
        else:
            self.guard.ended()

    def stepped(self, examples: int, logs: Any) -> None:
        """See `Hooks`."""
        if not self._checked_missing:
            self._checked_missing = True
            self._refuse_missing()
            if self._loop:
                self._warn_of_changes(self._watch.trained_weights())
            if self._factor_of_loop() != 1.0:
                self._say_scaled(self._watch.optimizers.values(), *self._batch_sizes_of_loop())
        if not self._facts.work_varies:  # whose speed changes with what was learned
            self.guard.called(examples)

    def epoch_began(self) -> None:
        """See `Hooks`: the script may have left the epoch before its data ended."""
        self.guard.epoch_ended()

    def epoch_ended(self) -> None:
        """See `Hooks`."""
        self.guard.epoch_ended()

    def _refuse_missing(self) -> None:
        for knob in self._settings.refuse_missing(self._facts, skip=self._skip_missing):
            say(f"{knob} has no effect: the script has no such call any more")

    def fit(self, model: Any, usual: Callable[..., Any], arguments: dict[str, Any], site: Site) -> Any:
        """See `Hooks`."""
        tuned = self._facts.fit_site
        if self._loop or tuned is None or site.key != tuned.key:
            with self._scaled_by(1.0, model):  # it may train within a callback of the tuned one
                return usual(model, **arguments)
        refuse_other_keras(model, self._keras)
        self._refuse_missing()
        apply.refuse_another_scope(model, self._configuration)
        call = FitCall(model=model, arguments=arguments, settings=self._settings)
        changed = call.changed_arguments(self._configuration, self._facts)
        apply.accumulate(model.optimizer, self._configuration)
        if self._settings.changes.get("jit_compile") is True and not model.jit_compile:
            say("jit_compile=true is not in force: Keras turns XLA off for this model")
        factor = self._factor_of_fit(call)
        watch = guard_callback(self.guard, call.batch_used or self._configuration.batch_size, may_train_again=True)
        callbacks = listed_callbacks(arguments["callbacks"])
        if self._compiled is not None:
            callbacks.append(naming_callback(model))
        callbacks.append(watch)
        if model.built:
            self._warn_of_changes(model.weights)
        else:  # the first step builds it
            on = keras.callbacks.LambdaCallback
            callbacks.append(on(on_epoch_end=lambda epoch, logs: self._warn_of_changes(model.weights)))
        with self._scaled_by(factor, model):
            return usual(model, **(arguments | changed | {"callbacks": callbacks}))

    def _scaled_by(self, factor: float, model: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._trainings is None else self._trainings.scaled(model, factor)

    def _warn_of_changes(self, weights: Sequence[Any]) -> None:
        if self._stale is not None:
            self._stale.warn(count_parameters(Weights(weights, weights)) or None)

    def _factor_of_fit(self, call: FitCall) -> float:
        """Return how many times its learning rate this call trains with. Say it where it is news."""
        own = "global_batch" in self._configuration
        before, after = call.batch_size, self._configuration.update_size if own else call.batch_used
        if self._scale is None or not before or not after:
            return 1.0
        factor = factor_of(self._scale, after / before)
        scaled = call.model if call.model.optimizer is None else call.model.optimizer
        if factor != 1.0 and self._scaled.get(scaled) != (before, after):  # its rate may change from call to call
            self._scaled[scaled] = (before, after)
            self._say_scaled([scaled], before, after)
        return factor

    def _batch_sizes_of_loop(self) -> tuple[int, int]:
        """Return the batch size of a custom loop, and the one in force."""
        lost = self._settings.refuse_missing(self._facts, skip=True)  # or not yet reached
        before = after = int(self._facts.baseline["batch_size"])
        if "batch_size" not in lost:
            after = int(self._settings.value("batch_size", before))
        return before, after

    def _factor_of_loop(self) -> float:
        """Return how many times its learning rate a custom loop trains with."""
        before, after = self._batch_sizes_of_loop()
        return 1.0 if self._scale is None else factor_of(self._scale, after / before)

    def _say_scaled(self, optimizers: Iterable[Any], before: int, after: int) -> None:
        """Say that the learning rates of the next steps are scaled, and why; not twice in a row."""
        assert self._scale is not None
        factor, changes = factor_of(self._scale, after / before), list[str]()
        for optimizer in optimizers:
            try:
                rate = float(optimizer.learning_rate)
                changes.append(f"{rate:g} → {factor * rate:g}")
            except (AttributeError, TypeError, ValueError):  # it is not readable
                changes.append(f"×{factor:g}")
        shown, why = ", ".join(dict.fromkeys(changes)), "as tested" if self._is_tested else "as asked for"
        text = (
            f"learning rate {shown}, {why}, for batches of {after} instead of {before} ({self._scale}); "
            "--keep-learning-rate leaves it"
        )
        if text != self._said_last:
            say(text)
        self._said_last = text


class Staleness:
    """The changes since a recipe was measured, said once.

    `here` is this machine; None where a change of it is not to be said.
    """

    def __init__(self, recipe: Recipe, command: str, *, here: Machine | None, say: Callable[[str], None] = say) -> None:
        self._changes = [] if here is None else list(recipe.machine.differences(here))
        self._parameters, self._command, self._say = recipe.workload.parameters, command, say
        self._said = not recipe.changes

    def warn(self, parameters: int | None) -> None:
        """Say it once, if there is anything. `parameters`: the weights of the model; None where it is not built yet."""
        if self._said:
            return
        self._said = True
        changes = list(self._changes)
        if parameters is not None and self._parameters is not None and parameters != self._parameters:
            changes.append(f"the model: measured with {self._parameters:,} weights, here {parameters:,}")
        if changes:
            self._say(describe_changes(changes, self._command))


def verify_command(recipe: Recipe, path: Path, script: str) -> str:
    """Return the command that measures a recipe's claim again, with a budget that suffices."""
    seconds = recipe.evidence.verify_seconds or VERIFY_SECONDS
    return f"{shlex.join(['autotune', 'verify', str(path), script])} --budget {seconds:.0f}s"


@dataclass(frozen=True)
class PreparedRun:
    """A script that is ready to run with a recipe's values: calling it runs it, and returns its exit code."""

    reference: WorkloadReference
    long_run: LongRun | None = None  # none where it trains as the script has it
    recipe_file: Path | None = None
    options: tuple[str, ...] = ()  # of `autotune run`, for the command that is named if the script starts again

    def __call__(self) -> int:
        """Run the script as Python does: show its exceptions, and return its exit code."""
        if self.recipe_file is not None:
            children.refuse_restarts(self.reference, run=(*self.options, str(self.recipe_file)))
        run = self.long_run
        try:
            run_as_main(self.reference)
        except AutotuneError as error:
            say(str(error))
            run = None
            return error.exit_code
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return int(end.code or 0)
            sys.stderr.write(f"{end.code}\n")
            return 1
        except KeyboardInterrupt:
            return 130
        except BaseException:
            sys.stderr.write(describe_frames(traceback.format_exc()))
            return 1
        finally:
            if run is not None:
                run.ended()
        return 0


def prepare_run(recipe_path: Path, script: str, args: list[str], options: LongRunOptions) -> PreparedRun:
    """Check that a recipe and a script belong together; return what runs it.

    Raises:
        ApplyError: The `fit` that was tuned is gone, and that may not be skipped.
        RecipeError: The recipe cannot be read, is of another script, or has no such configuration.
        WorkloadError: There is no such script.
        MachineMismatchError: With `strict`.
    """
    from autotune.recipe.recipe import find_recipe

    selection = find_recipe(recipe_path, say, strict=options.strict)
    recipe, file = selection.recipe, selection.path
    if not selection.takes_baseline:
        recipe = _answer_of(recipe, options)
        if not recipe.changes and "global_batch" not in recipe.baseline:
            say("the recipe is the baseline: the script runs as it is")
    reference = parse_reference(script).model_copy(update={"args": check_args(args)})
    facts = facts_in(recipe, file_of(reference), script)
    if reference.is_notebook:
        reference = open_notebook(reference, make_scratch("autotune-notebook-"), facts.skip_cells, say)
        say(f"{script} runs as a script: plots are not shown, and the notebook stays as it is")
    edits = recipe.changes.keys() & {"batched_map", "graph_step"}
    if edits and recipe.workload.fingerprint != fingerprint_of_script(reference):
        for name in sorted(edits):
            say(f"{name} is left out: the script has changed since it was proven; tune it again")
        edits |= {"jit_compile"} if "graph_step" in edits else set()  # of the same function
        own = {name: recipe.baseline[name] for name in edits & recipe.baseline.keys()}
        recipe = recipe.model_copy(update={"configuration": {**recipe.configuration, **own}})
    if selection.takes_baseline:
        return PreparedRun(reference)
    directory = directory_of(reference)
    if recipe.changes and facts.fit_site is not None and _is_gone(facts.fit_site, reference):
        gone = "its cell has changed since" if facts.fit_site.cell else "the script has no such call any more"
        lost = f"{facts.fit_site} was tuned, and {gone}: it trains without the recipe"
        if not options.skip_missing:
            hint = f"Tune it again: autotune tune {script}. Or pass --skip-missing to train without the recipe there."
            raise ApplyError(lost, hint=hint)
        say(lost)
    run = LongRun(
        recipe,
        file,
        directory,
        options,
        stale=Staleness(recipe, verify_command(recipe, file, script), here=fingerprint() if selection.fits else None),
        compiled=load_compiled(recipe, file.parent, fingerprint()),
    )
    run.install()
    return PreparedRun(reference, run, file, tuple(options.words))


def _is_gone(fit: Site, reference: WorkloadReference) -> bool:
    """Return whether no file of the script has this call any more."""
    # A call without a name is in no file: `exec` has made it. A package's has an absolute path.
    if not fit.call or Path(fit.file).is_absolute():
        return False
    directory = directory_of(reference)
    imported = Path(directory, fit.file)  # however the script imports it
    files = {
        *own_files(file_of(reference), Path(directory)),
        *([imported] if imported.suffix == ".py" and imported.is_file() else []),
    }
    return all(site.key != fit.key for file in files for site, _ in calls_in(str(file), directory).values())


def _answer_of(recipe: Recipe, options: LongRunOptions) -> Recipe:
    """Return the recipe of the answer that was asked for."""
    if options.same_training:
        return recipe.with_same_training()
    if options.larger_batch:
        recipe = recipe.with_larger_batch()
        if recipe.larger_batch is not None and (doubts := describe_doubts(recipe.larger_batch)):
            say(doubts)
    elif options.candidate:
        recipe = recipe.with_candidate()
        changes = Configuration(recipe.configuration).describe(relative_to=Configuration(recipe.baseline))
        say(f"training with the candidate {changes}, {recipe.evidence.speedup.shown()}, which is not confirmed")
    return recipe


def activate() -> None:
    """Use the recipe that the environment variable `AUTOTUNE_RECIPE` names, in the script that calls this.

    Call it at the top of a script, before TensorFlow is used. Does nothing where the variable is not set, and in
    trials.

    Raises:
        RecipeError: The recipe cannot be read, or was made for a `Workload`.
    """
    path = os.environ.get("AUTOTUNE_RECIPE")
    if path:
        from autotune.recipe.recipe import find_recipe

        directory = Path(sys._getframe(1).f_code.co_filename).resolve().parent
        selection = find_recipe(Path(path), say)
        compiled = load_compiled(selection.recipe, selection.path.parent, fingerprint())
        LongRun(selection.recipe, selection.path, str(directory), LongRunOptions(), compiled=compiled).install(
            begun=True
        )
