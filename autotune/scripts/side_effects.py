"""Keeps what a script writes out of its trials: saves do nothing, and files that exist are not written over."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.errors import WorkloadError
from autotune.run_directory import SCRATCH
from autotune.scripts.facts import ScriptSettings
from autotune.workloads.users_errors import users_frames
from autotune.workloads.workload import WorkloadReference

_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
}
_WRITING_CALLBACKS = frozenset({"ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger", "RemoteMonitor"})
_TRACKERS = frozenset({"wandb", "mlflow", "neptune", "comet_ml", "clearml", "dvclive", "aim", "swanlab"})
_WRITING = os.O_WRONLY | os.O_RDWR
_CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move", "os.link")
_MOVING = ("os.rename", "shutil.move", "os.link")
ALLOW = "Have the script write elsewhere, or pass --allow-writes if each trial may write to it."


def is_writing_callback(callback: Any) -> bool:
    """Whether a callback of `fit` writes files, or to an experiment tracker."""
    for kind in type(callback).__mro__:
        if kind.__name__ in _WRITING_CALLBACKS or kind.__module__.partition(".")[0] in _TRACKERS:
            return True
    return False


def replace_everywhere(original: Any, replacement: Any, *, below: tuple[str, ...] = ("keras",)) -> None:
    """Put a function in another's place, in every loaded module of these packages that has it."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(below) or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, replacement)


def effects_of(reference: WorkloadReference, refuse: Callable[[WorkloadError], None]) -> SideEffects:
    """What is left out in this process, which runs a script for its first steps only."""
    settings = reference.script or ScriptSettings()
    created = Path(settings.created or f"{tempfile.gettempdir()}/autotune-created-{os.getpid()}.txt")
    return SideEffects(created, allow_writes=settings.allow_writes, refuse=refuse)


class SideEffects:
    """What this process leaves out, and what it has made.

    Args:
        created: A file with a path a line: what trials of this run have made, and may write over.
        allow_writes: Files that exist may be written over.
        refuse: Is called with the error for a write that may not be; it need not come back.
    """

    def __init__(self, created: Path, *, allow_writes: bool, refuse: Callable[[WorkloadError], None]) -> None:
        self.left_out: list[str] = []
        self._created_file = created
        self._created = (
            set(created.read_text(encoding="utf-8", errors="surrogateescape").splitlines())
            if created.is_file()
            else set()
        )
        self._allow_writes, self._refuse = allow_writes, refuse
        prefixes = [tempfile.gettempdir(), "/dev", "/proc", "/sys", sys.prefix, sys.base_prefix, str(created.parent)]
        prefixes += [os.path.expanduser(f"~/{each}") for each in (".cache", ".config", ".keras", ".local")]
        here = os.getcwd()
        self._others = tuple(os.path.join(each, "") for each in prefixes if not here.startswith(each))
        self._inside = self._watches = False
        self._temporary = os.path.join(tempfile.gettempdir(), "")
        self._began = time.time()

    @property
    def scratch(self) -> Path:
        """Takes the files of this process's own, such as those of caches; the run removes it."""
        return self._created_file.with_name(SCRATCH)

    def leave_out(self, what: str) -> None:
        """Note what is left out."""
        if what not in self.left_out:
            self.left_out.append(what)

    def install(self, tf: Any, keras: Any) -> None:
        """Turn off what saves and uploads, and watch what is written."""
        os.environ.update(_TRACKERS_OFF)
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"file:{tempfile.gettempdir()}/autotune-mlflow")
        for owner, name in (
            (keras.Model, "save"),
            (keras.Model, "save_weights"),
            (keras.Model, "export"),
            (tf.train.Checkpoint, "save"),
            (tf.train.Checkpoint, "write"),
            (tf.train.CheckpointManager, "save"),
        ):
            setattr(owner, name, self._nothing(f"{owner.__name__}.{name}"))
        saving = (getattr(keras.saving, name, None) for name in ("save_model", "save_weights"))
        for function in (*filter(None, saving), tf.saved_model.save):
            replace_everywhere(
                function, self._nothing(function.__name__), below=("keras", "tensorflow._api", "tensorflow.saved_model")
            )
        noop = tf.summary.create_noop_writer
        for module in (tf.summary, tf.compat.v2.summary):
            module.create_file_writer = self._nothing("tf.summary", noop)
        self._wrap_tensorflow_files(tf)
        self.watch_writes()

    def watch_writes(self) -> None:
        """Refuse writes to files that exist, and note what is made, from now on."""
        if not self._allow_writes and not self._watches:
            self._watches = True
            sys.addaudithook(self._audit)

    def kept(self, callbacks: Any) -> list[Any]:
        """The callbacks of `fit` that do not write."""
        given = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
        for each in given:
            if is_writing_callback(each):
                self.leave_out(type(each).__name__)
        return [each for each in given if not is_writing_callback(each)]

    def _nothing(self, what: str, instead: Callable[[], Any] | None = None) -> Callable[..., Any]:
        """A function that does nothing. It returns what `instead` does, or the path that it was given."""

        def nothing(*arguments: Any, **_: Any) -> Any:
            self.leave_out(what)
            if instead is not None:
                return instead()
            return str(arguments[1]) if len(arguments) > 1 and isinstance(arguments[1], str | Path) else ""

        return nothing

    def _wrap_tensorflow_files(self, tf: Any) -> None:
        """TensorFlow opens files behind Python's back: what makes or changes one says so first."""
        kind, usual = tf.io.TFRecordWriter, tf.io.TFRecordWriter.__init__

        def opened(writer: Any, path: Any, *arguments: Any, **named: Any) -> None:
            full = os.path.abspath(os.fspath(path))
            if os.path.exists(full) and not self._allow_writes:  # another trial may be reading it
                self.leave_out("TFRecordWriter, for files that exist")
                path = os.devnull
            else:
                self._writes("open", full)
            usual(writer, path, *arguments, **named)

        kind.__init__ = opened
        self._wrap_h5py()
        file = tf.io.gfile.GFile
        opens = file.__init__

        def opened_file(self_: Any, name: Any, mode: str = "r") -> None:
            if set(mode) & set("wa+"):
                self._writes("open", name)
            opens(self_, name, mode)

        file.__init__ = opened_file
        for module, name, event in (
            (tf.io, "write_file", "open"),
            (tf.io.gfile, "makedirs", "os.mkdir"),
            (tf.io.gfile, "mkdir", "os.mkdir"),
            (tf.io.gfile, "remove", "os.remove"),
            (tf.io.gfile, "rmtree", "shutil.rmtree"),
            (tf.io.gfile, "rename", "os.rename"),
        ):
            setattr(module, name, self._saying(getattr(module, name), event))

    def _wrap_h5py(self) -> None:
        h5py = sys.modules.get("h5py")
        if h5py is None:
            return
        opens = h5py.File.__init__

        def opened(file: Any, name: Any, mode: str = "r", *arguments: Any, **named: Any) -> None:
            if mode != "r":
                self._writes("open", name)
            opens(file, name, mode, *arguments, **named)

        h5py.File.__init__ = opened

    def _saying(self, usual: Callable[..., Any], event: str) -> Callable[..., Any]:
        def said(path: Any, *arguments: Any, **named: Any) -> Any:
            self._writes(event, path)
            return usual(path, *arguments, **named)

        return said

    def _writes(self, event: str, path: Any) -> None:
        """A function of TensorFlow's is about to make or change a file."""
        if isinstance(path, str | os.PathLike) and "://" not in str(path) and not self._allow_writes:
            self._look(event, os.path.abspath(os.fspath(path)))

    def _note(self, full: str) -> None:
        """Remember what this process makes."""
        if full in self._created or "\n" in full:
            return
        self._created.add(full)
        self._inside = True
        try:
            with self._created_file.open("a", encoding="utf-8", errors="surrogateescape") as stream:
                stream.write(full + "\n")
        finally:
            self._inside = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside or (event != "open" and event != "os.mkdir" and event not in _CHANGING):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        path = arguments[0]
        if isinstance(path, int) or path is None:
            return
        self._look(event, os.path.abspath(os.fsdecode(path)))
        if event in _MOVING and isinstance(arguments[1], str | bytes | os.PathLike):
            self._look("open", os.path.abspath(os.fsdecode(arguments[1])))

    def _look(self, event: str, full: str) -> None:
        """Note what is made, and refuse what is not the trials' own to change."""
        if full.startswith(self._temporary) and event in _CHANGING and _is_older(full, self._began):
            self._refuse_change(event, full)
        if full.startswith(self._others) or f"{os.sep}__pycache__{os.sep}" in full:
            return
        exists = os.path.exists(full)
        if event in ("open", "os.mkdir"):
            if not exists:
                for each in (full, *map(str, Path(full).parents)):  # one call may make all of them
                    if not os.path.exists(each):
                        self._note(each)
                return
            if event == "os.mkdir" or full in self._created or not os.path.isfile(full):
                return
        elif not exists or full in self._created or self._is_ours(full):
            return
        self._refuse_change(event, full)

    def _refuse_change(self, event: str, full: str) -> None:
        frame = users_frames(traceback.extract_stack())[-1:]
        where = f"{frame[0].filename}, line {frame[0].lineno}" if frame else "a package"
        verb = "writes to" if event == "open" else "changes"
        self._inside = True
        self._refuse(WorkloadError(f"{where}: {verb} {full}, which exists, before it trains", hint=ALLOW))

    def _is_ours(self, directory: str) -> bool:
        """Whether all that is below a directory was made by this run."""
        below = [os.path.join(root, each) for root, _, files in os.walk(directory) for each in files]
        return bool(below) and self._created.issuperset(below)


def _is_older(path: str, than: float) -> bool:
    """Whether something is there that was there before this process began to watch."""
    try:
        return os.lstat(path).st_ctime < than
    except OSError:
        return False
