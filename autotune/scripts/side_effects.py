"""Keeps what a script writes out of its trials: saves do nothing, and files that exist are not written over."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotune.errors import WorkloadError
from autotune.run_directory import SCRATCH
from autotune.scripts.facts import ScriptSettings
from autotune.scripts.wrapping import around, replace_everywhere
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
_MOVING = ("os.rename", "shutil.move", "os.link")
_CHANGING = ("os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", *_MOVING)
_MAKING = ("open", "os.mkdir")
_WATCHED = frozenset((*_MAKING, *_CHANGING))
ALLOW = "Have the script write elsewhere, or pass --allow-writes if each trial may write to it."


def listed_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks that `fit` is given, as a list."""
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []


def _writes_files(callback: Any) -> bool:
    """Whether a callback of `fit` writes files, or to an experiment tracker."""
    kinds = type(callback).__mro__
    return any(each.__name__ in _WRITING_CALLBACKS or each.__module__.partition(".")[0] in _TRACKERS for each in kinds)


class SideEffects:
    """What this process of a script leaves out, and what it has made: a path a line in a file of the run's.

    Args:
        reference: The script.
        refuse: Is called with the error for a write that may not be; it need not come back.
    """

    def __init__(self, reference: WorkloadReference, refuse: Callable[[WorkloadError], None]) -> None:
        settings = reference.script or ScriptSettings()
        temporary = tempfile.gettempdir()
        self.left_out: list[str] = []
        self._created_file = Path(settings.created or f"{temporary}/autotune-created-{os.getpid()}.txt")
        self._created = set(_lines(self._created_file))
        self.scratch = self._created_file.with_name(SCRATCH)
        """Takes the files of this process's own, such as those of caches; the run removes it."""
        self._allow_writes, self._refuse = settings.allow_writes, refuse
        prefixes = [temporary, "/dev", "/proc", "/sys", sys.prefix, sys.base_prefix, str(self._created_file.parent)]
        prefixes += [os.path.expanduser(f"~/{each}") for each in (".cache", ".config", ".keras", ".local")]
        here = os.getcwd()
        self._others = tuple(os.path.join(each, "") for each in prefixes if not here.startswith(each))
        self._inside = False
        self._instead: dict[str, str] = {}  # files of this process's own, for those that exist
        self._temporary = os.path.join(temporary, "")
        self._began = time.time()

    def install(self, tf: Any, keras: Any) -> None:
        """Turn off what saves and uploads, and watch what is written."""
        os.environ.update(_TRACKERS_OFF)
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"file:{self.scratch}/mlflow")
        checkpoints = ((tf.train.Checkpoint, "save"), (tf.train.Checkpoint, "write"))
        models = ((keras.Model, name) for name in ("save", "save_weights", "export"))
        for owner, name in (*models, *checkpoints, (tf.train.CheckpointManager, "save")):
            setattr(owner, name, self._nothing(f"{owner.__name__}.{name}"))
        saving = (getattr(keras.saving, name, None) for name in ("save_model", "save_weights"))
        for function in (*filter(None, saving), tf.saved_model.save):
            replace_everywhere(
                function, self._nothing(function.__name__), below=("keras", "tensorflow._api", "tensorflow.saved_model")
            )
        noop = tf.summary.create_noop_writer
        for module in (tf.summary, tf.compat.v2.summary):
            module.create_file_writer = self._nothing("tf.summary", noop)
        if not self._allow_writes:
            self._watch_tensorflow(tf)
            self.watch_writes()

    def watch_writes(self) -> None:
        """Refuse writes to files that exist, and note what is made, from now on."""
        if not self._allow_writes:
            around(builtins, "open", self._opened)
            io.open = builtins.open  # pathlib's
            sys.addaudithook(self._audit)

    def kept(self, callbacks: Any) -> list[Any]:
        """The callbacks of `fit` that do not write."""
        given = listed_callbacks(callbacks)
        for each in filter(_writes_files, given):
            self._leave_out(type(each).__name__)
        return [each for each in given if not _writes_files(each)]

    def _leave_out(self, what: str) -> None:
        if what not in self.left_out:
            self.left_out.append(what)

    def _nothing(self, what: str, instead: Callable[[], Any] | None = None) -> Callable[..., Any]:
        """A function that does nothing. It returns what `instead` does, or the path that it was given."""

        def nothing(*arguments: Any, **_: Any) -> Any:
            self._leave_out(what)
            if instead is not None:
                return instead()
            return str(arguments[1]) if len(arguments) > 1 and isinstance(arguments[1], str | Path) else ""

        return nothing

    # ------------------------------------------------------------------------------------------ what is written

    def _watch_tensorflow(self, tf: Any) -> None:
        """TensorFlow and h5py open files behind Python's back: what makes or changes one says so first."""

        def writer(usual: Callable[..., Any], made: Any, path: Any, *arguments: Any, **named: Any) -> None:
            if os.path.exists(os.fspath(path)):  # another trial may be reading it
                self._leave_out("TFRecordWriter, for files that exist")
                path = os.devnull
            self._writes("open", path)
            usual(made, path, *arguments, **named)

        def opened(
            usual: Callable[..., Any], made: Any, name: Any, mode: str = "r", *arguments: Any, **named: Any
        ) -> None:
            if set(mode) & set("wax+"):
                self._writes("open", name)
            usual(made, name, mode, *arguments, **named)

        def said(event: str, usual: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> Any:
            if event in ("os.remove", "shutil.rmtree") and not tf.io.gfile.exists(path):
                return None  # a save would have made it
            self._writes(event, path)
            return usual(path, *arguments, **named)

        around(tf.io.TFRecordWriter, "__init__", writer)
        around(tf.io.gfile.GFile, "__init__", opened)
        if "h5py" in sys.modules:
            around(sys.modules["h5py"].File, "__init__", opened)
        around(tf.io, "write_file", partial(said, "open"))
        for name, event in (
            ("makedirs", "os.mkdir"),
            ("mkdir", "os.mkdir"),
            ("remove", "os.remove"),
            ("rmtree", "shutil.rmtree"),
            ("rename", "os.rename"),
        ):
            around(tf.io.gfile, name, partial(said, event))

    def _opened(self, usual: Callable[..., Any], file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        """A file that exists is kept: what is written to it goes to one of this process's own, and is read there."""
        if isinstance(file, str | bytes | os.PathLike) and not self._inside:
            full = os.path.abspath(os.fsdecode(file))
            if mode.lstrip("bt")[:1] in ("w", "a") and full not in self._instead and self._keeps(full):
                self._leave_out("open() of files that exist")
                self.scratch.mkdir(exist_ok=True)
                own = self.scratch / f"written-{os.getpid()}-{len(self._instead)}"
                if "a" in mode:
                    shutil.copyfile(full, own)
                self._instead[full] = str(own)
            file = self._instead.get(full, file)
        return usual(file, mode, *arguments, **named)

    def _keeps(self, full: str) -> bool:
        """Whether a file exists that is not the trials' own to change."""
        return os.path.isfile(full) and full not in self._created and not full.startswith(self._others)

    def _writes(self, event: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and "://" not in str(path):
            self._look(event, os.path.abspath(os.fspath(path)))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside or event not in _WATCHED:
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
        if full in self._created:
            return
        if full.startswith(self._temporary):
            if event in _CHANGING and _is_older(full, self._began):
                self._refuse_change(event, full)
            if event == "os.mkdir" and not os.path.exists(full):  # another trial may remove it
                self._note(iter([full]))
        if full.startswith(self._others) or f"{os.sep}__pycache__{os.sep}" in full:
            return
        if not os.path.exists(full):
            if event in _MAKING:  # one call may make its parents as well
                self._note(each for each in (full, *map(str, Path(full).parents)) if not os.path.exists(each))
            return
        if event in _MAKING and (event == "os.mkdir" or not os.path.isfile(full)):
            return
        if event in _CHANGING and (below := list(_files_below(full))) and self._created.issuperset(below):
            return
        self._refuse_change(event, full)

    def _note(self, made: Iterator[str]) -> None:
        """Remember what this process makes."""
        new = [each for each in made if each not in self._created and "\n" not in each]
        self._created.update(new)
        self._inside = True
        try:
            with self._created_file.open("a", encoding="utf-8", errors="surrogateescape") as stream:
                stream.writelines(f"{each}\n" for each in new)
        finally:
            self._inside = False

    def _refuse_change(self, event: str, full: str) -> None:
        frame = users_frames(traceback.extract_stack())[-1:]
        where = f"{frame[0].filename}, line {frame[0].lineno}" if frame else "a package"
        verb = "writes to" if event == "open" else "changes"
        self._inside = True
        self._refuse(WorkloadError(f"{where}: {verb} {full}, which exists", hint=ALLOW))


def _is_older(path: str, than: float) -> bool:
    """Whether something is there that was there before this process began to watch."""
    try:
        return os.lstat(path).st_ctime < than
    except OSError:
        return False


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _files_below(directory: str) -> Iterator[str]:
    return (os.path.join(root, each) for root, _, files in os.walk(directory) for each in files)


def remove_created(listed: Path, directories: Sequence[str]) -> None:
    """Remove what trials have made below these directories, by the list that they kept.

    A directory that they have made goes as a whole, or stays where it holds what is not on the list.
    """
    below = tuple(os.path.join(each, "") for each in directories)
    known = {each for each in _lines(listed) if each.startswith(below)}
    kept: list[str] = []
    for path in sorted(known, key=len):
        if path.startswith(tuple(kept)):
            continue
        if not os.path.isdir(path) or os.path.islink(path):
            with contextlib.suppress(OSError):
                os.unlink(path)
        elif known.issuperset(_files_below(path)):
            shutil.rmtree(path, ignore_errors=True)
        else:
            kept.append(os.path.join(path, ""))
    listed.unlink(missing_ok=True)
