"""Keep a script's side effects out of its trials: uploads always, saves where the kernel does not contain trials."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.data.run_directory import SCRATCH
from autotune.runtime import containment
from autotune.runtime.created_files import CreatedFiles
from autotune.script.interpose import replace_everywhere
from autotune.script.write_watch import WriteWatch

_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
}
_TRACKERS = frozenset({"wandb", "mlflow", "neptune", "comet_ml", "clearml", "dvclive", "aim", "swanlab"})
_RESULT_CALLBACKS = frozenset({"ModelCheckpoint", "CSVLogger"})
_OTHER_WRITING_CALLBACKS = frozenset({"BackupAndRestore", "TensorBoard", "RemoteMonitor"})


def listed_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks that `fit` is given, as a list."""
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []


def disable_trackers(scratch: Path) -> None:
    """Keep experiment trackers offline, whatever the user's shell says. MLflow may still load registered models."""
    if server := os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ.setdefault("MLFLOW_REGISTRY_URI", server)
    os.environ.update(_TRACKERS_OFF, MLFLOW_TRACKING_URI=f"file:{scratch}/mlflow")


class SideEffects:
    """The side effects of a script that this process omits in its trial.

    Args:
        reference: The script.
        refuse: Takes the error of a write that may not be. It need not return.
    """

    def __init__(self, reference: WorkloadReference, refuse: Callable[[WorkloadError], None]) -> None:
        settings = reference.script or ScriptSettings()
        listed = Path(settings.created or f"{tempfile.gettempdir()}/autotune-created-{os.getpid()}.txt")
        self.left_out: list[str] = []
        self.scratch = listed.with_name(SCRATCH)
        """A directory for this process's own files, such as caches; the run removes it."""
        self._allow_writes = settings.allow_writes
        self._watch = WriteWatch(CreatedFiles(listed), self.scratch, self._leave_out, refuse)

    def install(self, tf: Any, keras: Any) -> None:
        """Turn off uploads and, where the kernel does not contain this process, saves and other writes."""
        disable_trackers(self.scratch)
        if containment.is_active():
            return
        checkpoints = ((tf.train.Checkpoint, "save"), (tf.train.Checkpoint, "write"))
        models = ((keras.Model, name) for name in ("save", "save_weights", "export"))
        for owner, name in (*models, *checkpoints, (tf.train.CheckpointManager, "save")):
            setattr(owner, name, self._do_nothing(f"{owner.__name__}.{name}"))
        saving = (getattr(keras.saving, name, None) for name in ("save_model", "save_weights"))
        packages = ("keras", "tensorflow._api", "tensorflow.saved_model")
        for function in (*filter(None, saving), tf.saved_model.save):
            replace_everywhere(function, self._do_nothing(function.__name__), below=packages)
        for module in (tf.summary, tf.compat.v2.summary):
            module.create_file_writer = self._do_nothing("tf.summary", tf.summary.create_noop_writer)
        if not self._allow_writes:
            self._watch.install_tensorflow(tf)
            self._watch.install()

    def watch_writes(self) -> None:
        """Watch Python's writes from now on, where the kernel does not contain this process."""
        if not self._allow_writes and not containment.is_active():
            self._watch.install()

    def training_begins(self) -> None:
        """List what this process has created. From now on, new files go to the scratch directory as well."""
        if not containment.is_active():
            self._watch.training_begins()

    def without_writers(self, callbacks: Any, *, timed: bool = False) -> list[Any]:
        """Return the callbacks of `fit` that do not write. A contained `fit` that is not timed keeps its results."""
        keeps_results = containment.is_active() and not timed  # the script may load what its earlier `fit` has saved
        harmless = []
        for callback in listed_callbacks(callbacks):
            kinds = type(callback).__mro__
            names = {kind.__name__ for kind in kinds}
            saves_results = bool(names & _RESULT_CALLBACKS)
            writes = bool(names & _OTHER_WRITING_CALLBACKS) or any(
                kind.__module__.partition(".")[0] in _TRACKERS for kind in kinds
            )
            if writes or saves_results:
                self._leave_out(type(callback).__name__)
            if not writes and (keeps_results or not saves_results):
                harmless.append(callback)
        return harmless

    def _leave_out(self, name: str) -> None:
        if name not in self.left_out:
            self.left_out.append(name)

    def _do_nothing(self, name: str, instead: Callable[[], Any] | None = None) -> Callable[..., Any]:
        """Return a function that does nothing. It returns the result of `instead`, or the path that it was given."""

        def nothing(*arguments: Any, **_: Any) -> Any:
            self._leave_out(name)
            if instead is not None:
                return instead()
            return str(arguments[1]) if len(arguments) > 1 and isinstance(arguments[1], str | Path) else ""

        return nothing
