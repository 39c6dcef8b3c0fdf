"""Keep a script's side effects out of its trials: uploads always, saves where the kernel does not contain trials."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.data.run_directory import SCRATCH
from autotune.recipe.keras_api import KERAS_PACKAGES
from autotune.runtime import containment
from autotune.runtime.created_files import CreatedFiles
from autotune.runtime.failures import locate_user_line, select_user_frames
from autotune.script.interpose import around, replace_everywhere

_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
}
_TRACKERS = frozenset({"wandb", "mlflow", "neptune", "comet_ml", "clearml", "dvclive", "aim", "swanlab"})
_RESULT_CALLBACKS = frozenset({"ModelCheckpoint", "CSVLogger"})
_OTHER_WRITING_CALLBACKS = frozenset({"BackupAndRestore", "TensorBoard", "RemoteMonitor"})
_CREATES = ("open", "os.mkdir", "os.link", "os.symlink")
_EVENTS: dict[str, tuple[tuple[str, int, int | None], ...]] = {
    "open": (("open", 0, None),),
    "os.mkdir": (("os.mkdir", 0, 2),),
    "os.link": (("os.link", 1, 3),),
    "os.symlink": (("os.symlink", 1, 2),),
    "os.remove": (("os.remove", 0, 1),),
    "os.rmdir": (("os.rmdir", 0, 1),),
    "os.truncate": (("os.truncate", 0, None),),
    "os.chmod": (("os.chmod", 0, 2),),
    "os.chown": (("os.chown", 0, 3),),
    "os.utime": (("os.utime", 0, 3),),
    "os.setxattr": (("os.setxattr", 0, None),),
    "os.removexattr": (("os.removexattr", 0, None),),
    "os.rename": (("os.rename", 0, 2), ("open", 1, 3)),
    "shutil.move": (("shutil.move", 0, None), ("open", 1, None)),
    "shutil.rmtree": (("shutil.rmtree", 0, 1),),
}
"""Python's audit events that change files: the change, the index of the path, and the index of its `dir_fd`."""
_PROGRAM_EVENTS = {"subprocess.Popen": 1, "os.system": 0, "os.posix_spawn": 1, "os.exec": 1}
"""Audit events that start a program, and the index of its command."""
_READING_PROGRAMS = frozenset(
    (
        *("cat", "clear", "cut", "date", "df", "du", "echo", "file", "free", "grep", "head", "hostname"),
        *("id", "ldconfig", "ls", "lsb_release", "lscpu", "md5sum", "nproc", "nvidia-smi", "printf", "ps"),
        *("pwd", "rocm-smi", "sha256sum", "sleep", "stat", "stty", "tail", "tput", "tr", "true", "uname"),
        *("uniq", "wc", "which", "whoami"),
    )
)
_READING_GIT = frozenset({"describe", "diff", "log", "ls-files", "rev-parse", "show", "status"})
_WRITES_IN_SHELL = re.compile(r"[>`\n]|\$\(")
_GFILE_EVENTS = {"makedirs": "os.mkdir", "mkdir": "os.mkdir", "remove": "os.remove", "rmtree": "shutil.rmtree"}
_ALLOW = "Write to another file, or pass --allow-writes to let every trial write to it."
_ALLOW_PROGRAM = "Skip it while tuning, or pass --allow-writes to let every trial run it."


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

    `refuse` takes the error of a write that may not be. It need not return.
    """

    def __init__(self, reference: WorkloadReference, refuse: Callable[[WorkloadError], None]) -> None:
        settings = reference.script or ScriptSettings()
        listed = Path(settings.created or f"{tempfile.gettempdir()}/autotune-created-{os.getpid()}.txt")
        self.left_out: list[str] = []
        self.scratch = listed.with_name(SCRATCH)
        """A directory for this process's own files, such as caches; the run removes it."""
        self._allow_writes = settings.allow_writes
        self._watch = WriteWatch(CreatedFiles(listed), self.scratch, self._leave_out, refuse)

    def install(self, tf: Any) -> None:
        """Turn off uploads and, where the kernel does not contain this process, saves and other writes.

        Keras's own saves stay until `install_keras`.
        """
        disable_trackers(self.scratch)
        if containment.is_active():
            return
        checkpoints = ((tf.train.Checkpoint, "save"), (tf.train.Checkpoint, "write"))
        for owner, name in (*checkpoints, (tf.train.CheckpointManager, "save")):
            setattr(owner, name, self._do_nothing(f"{owner.__name__}.{name}"))
        self._replace(tf.saved_model.save)
        for module in (tf.summary, tf.compat.v2.summary):
            module.create_file_writer = self._do_nothing("tf.summary", tf.summary.create_noop_writer)
        if not self._allow_writes:
            self._watch.install_tensorflow(tf)
            self._watch.install()

    def install_keras(self, keras: Any) -> None:
        """Turn off the saves of a Keras, where the kernel does not contain this process."""
        if containment.is_active():
            return
        for name in ("save", "save_weights", "export"):
            setattr(keras.Model, name, self._do_nothing(f"Model.{name}"))
        for function in filter(None, (getattr(keras.saving, name, None) for name in ("save_model", "save_weights"))):
            self._replace(function)

    def _replace(self, function: Any) -> None:
        packages = (*KERAS_PACKAGES, "tensorflow._api", "tensorflow.saved_model")
        replace_everywhere(function, self._do_nothing(function.__name__), below=packages)

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


_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT


class WriteWatch:
    """Watches what this process writes.

    Files of its own go to `scratch`. `refuse` takes the error of a change that may not be. It need not return.
    """

    def __init__(
        self,
        created: CreatedFiles,
        scratch: Path,
        leave_out: Callable[[str], None],
        refuse: Callable[[WorkloadError], None],
    ) -> None:
        self._created, self._scratch, self._leave_out, self._refuse = created, scratch, leave_out, refuse
        self._temporary = os.path.join(tempfile.gettempdir(), "")
        folders = [self._temporary, "/dev", "/proc", "/sys", sys.prefix, sys.base_prefix, str(scratch.parent)]
        folders += [os.path.expanduser(f"~/{name}") for name in (".cache", ".config", ".keras", ".local")]
        here = os.getcwd()
        self._unwatched = tuple(os.path.join(path, "") for path in folders if not here.startswith(path.rstrip(os.sep)))
        self._copies: dict[str, str] = {}  # by the file that the script names
        self._paused = False  # while autotune itself writes
        self._training = False
        self._began = time.time()

    def install(self) -> None:
        """Watch Python's functions. An audit hook cannot be removed again."""
        around(builtins, "open", self._open)
        io.open = builtins.open  # pathlib's
        for name in ("chmod", "utime", "setxattr"):  # `shutil.copy` sets them on the file that it has written
            around(os, name, self._set_attribute)
        self._copy_databases()
        sys.addaudithook(self._audit)

    def install_tensorflow(self, tf: Any) -> None:
        """Watch functions of TensorFlow and h5py, which open files without Python's knowledge."""
        around(tf.io.gfile.GFile, "__init__", self._open_by_mode)
        if "h5py" in sys.modules:
            around(sys.modules["h5py"].File, "__init__", self._open_by_mode)
        around(tf.io.TFRecordWriter, "__init__", self._open_records)
        around(tf.data.Dataset, "save", self._save_dataset)
        around(tf.io, "write_file", partial(self._change_path, "open"))
        for name, event in _GFILE_EVENTS.items():
            around(tf.io.gfile, name, partial(self._change_path, event))
        for name, event in (("rename", "os.rename"), ("copy", "")):
            around(tf.io.gfile, name, partial(self._move, event))

    def training_begins(self) -> None:
        """List what this process has created. From now on, new files go to the scratch directory as well."""
        self._training = self._paused = True
        try:
            self._created.save()
        finally:
            self._paused = False

    # ------------------------------------------------------------------------------------------ TensorFlow

    def _open_records(self, usual: Callable[..., Any], writer: Any, path: Any, *rest: Any, **named: Any) -> None:
        if os.path.exists(os.fspath(path)):  # another trial may be reading it
            self._leave_out("TFRecordWriter, for files that exist")
            path = os.devnull
        self._check("open", path)
        usual(writer, path, *rest, **named)

    def _open_by_mode(
        self, usual: Callable[..., Any], opened: Any, name: Any, mode: str = "r", *rest: Any, **named: Any
    ) -> None:
        if set(mode) & set("wax+"):
            self._check("open", name)
        usual(opened, name, mode, *rest, **named)

    def _change_path(self, event: str, usual: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        path = arguments[0] if arguments else named.get("path", named.get("filename"))
        if event in ("os.remove", "shutil.rmtree") and not _exists(path):
            return None  # a save would have created it
        self._check(event, path)
        return usual(*arguments, **named)

    def _move(self, event: str, usual: Callable[..., Any], src: Any, dst: Any, overwrite: bool = False) -> Any:
        if event:
            self._check(event, src)
        if overwrite or not _exists(dst):  # otherwise TensorFlow refuses
            self._check("open", dst)
        return usual(src, dst, overwrite)

    def _save_dataset(self, usual: Callable[..., Any], dataset: Any, path: Any, *rest: Any, **named: Any) -> Any:
        if os.path.exists(os.fspath(path)):
            self._check("shutil.rmtree", path)
        self._check("os.mkdir", path)
        return usual(dataset, path, *rest, **named)

    # ------------------------------------------------------------------------------------------ copies

    def _open(self, usual: Callable[..., Any], file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        """Open a file; instead of one that may not be written, open this process's copy."""
        if isinstance(file, str | bytes | os.PathLike) and not self._paused:
            full = os.path.abspath(os.fsdecode(file))
            kind = mode.lstrip("bt")[:1]
            if kind in ("w", "a") and full not in self._copies and self._needs_copy(full, kind):
                copy = self._new_copy()
                if os.path.isfile(full):
                    self._leave_out("open() of files that exist")
                    if kind == "a":
                        shutil.copyfile(full, copy)
                self._copies[full] = copy
            file = self._copies.get(full, file)
        return usual(file, mode, *rest, **named)

    def _set_attribute(self, usual: Callable[..., Any], path: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            path = self._copies.get(os.path.abspath(os.fsdecode(path)), path)
        return usual(path, *rest, **named)

    def _copy_databases(self) -> None:
        """Give this process a copy of each existing SQLite database that it opens."""
        try:
            import sqlite3
        except ImportError:  # Python was built without it
            return
        usual = sqlite3.connect

        def connect(database: Any, *rest: Any, **named: Any) -> Any:
            full = _database_path(database)
            if full is not None and not self._paused and full not in self._copies and self._is_users(full):
                self._leave_out("SQLite databases that exist")
                self._paused = True
                try:
                    copied = self._new_copy()
                    with (
                        contextlib.closing(usual(f"{Path(full).as_uri()}?mode=ro", uri=True)) as original,
                        contextlib.closing(usual(copied)) as copy,
                    ):
                        original.backup(copy)
                    self._copies[full] = copied
                finally:
                    self._paused = False
            return usual(self._copies.get(full or "", database), *rest, **named)

        sqlite3.connect = sqlite3.dbapi2.connect = connect

    def _new_copy(self) -> str:
        self._scratch.mkdir(exist_ok=True)
        return str(self._scratch / f"written-{os.getpid()}-{len(self._copies)}")

    def _needs_copy(self, full: str, kind: str) -> bool:
        """Return whether writes to a file belong in the scratch directory.

        A new file that is appended to is a log. Nobody reads one that is written once training has begun.
        """
        if os.path.isfile(full):
            return self._is_users(full) or (self._training and self._created.owns(full))
        new = not os.path.lexists(full) and os.path.isdir(os.path.dirname(full))
        return new and (self._training or kind == "a") and not full.startswith(self._unwatched)

    def _is_users(self, full: str) -> bool:
        """Return whether a file exists that no trial has created, where the user's files are watched."""
        if not os.path.isfile(full) or self._created.owns(full):
            return False
        if full.startswith(self._temporary) and self._temporary in self._unwatched:
            return _is_older(full, self._began)
        return not full.startswith(self._unwatched)

    # ------------------------------------------------------------------------------------------ refusals

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._paused:
            return
        if event in _PROGRAM_EVENTS:
            self._check_program(arguments[_PROGRAM_EVENTS[event]])
        elif event == "sqlite3.connect":
            full = _database_path(arguments[0])
            if full is not None and full not in self._copies.values():
                self._check_full("open", full)
        elif event != "open" or (isinstance(arguments[2], int) and arguments[2] & _WRITE_FLAGS):
            for change, index, descriptor in _EVENTS.get(event, ()):
                path = arguments[index]
                if path is None or (event == "open" and isinstance(path, int)):
                    continue
                within = arguments[descriptor] if descriptor is not None and len(arguments) > descriptor else -1
                self._check_full(change, _full_path(path, within))

    def _check(self, event: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and "://" not in str(path):
            self._check_full(event, os.path.abspath(os.fspath(path)))

    def _check_full(self, event: str, full: str) -> None:
        """Note what is created, and refuse changes of the user's files."""
        created, creates, exists = self._created, event in _CREATES, os.path.lexists(full)
        if created.owns(full) and (creates or not exists or created.may_remove(full)):
            created.add(full)
            return
        if full.startswith(self._temporary):
            if not creates and _is_older(full, self._began):
                self._refuse_change(event, full)
            if event == "os.mkdir" and not exists:  # another trial may remove it
                created.add(full)
        if full.startswith(self._unwatched) or f"{os.sep}__pycache__{os.sep}" in full:
            return
        if not exists:
            if creates:
                created.add(full)
        elif (event == "open" and os.path.isfile(full)) if creates else not created.may_remove(full):
            self._refuse_change(event, full)

    def _check_program(self, command: Any) -> None:
        """Refuse a program that the script itself starts, unless it only reads: its writes cannot be seen."""
        frame = _calling_frame()
        if frame is None or _only_reads(command):
            return
        text = command if isinstance(command, str | bytes) else shlex.join(map(os.fsdecode, command))
        self._paused = True
        self._refuse(
            WorkloadError(
                f"{frame.filename}, line {frame.lineno}: starts `{os.fsdecode(text)[:200]}`; this machine "
                "cannot isolate the files that other programs write",
                hint=_ALLOW_PROGRAM,
            )
        )

    def _refuse_change(self, event: str, full: str) -> None:
        verb = "overwrite" if event == "open" else "change"
        line = locate_user_line(traceback.extract_stack())
        self._paused = True
        self._refuse(WorkloadError(f"{line}: would {verb} {full}", hint=_ALLOW))


def _exists(path: Any) -> bool:
    """Return whether a file is there for TensorFlow, which reads remote ones too."""
    import tensorflow as tf

    return bool(tf.io.gfile.exists(path))


def _full_path(path: Any, directory: Any) -> str:
    """Return the absolute path of an audit event's argument, which may be a descriptor or relative to one."""
    if isinstance(path, int):
        return os.path.realpath(f"/proc/self/fd/{path}")
    name = os.fsdecode(path)
    if isinstance(directory, int) and directory >= 0:
        name = os.path.join(os.path.realpath(f"/proc/self/fd/{directory}"), name)
    return os.path.abspath(name)


def _database_path(database: Any) -> str | None:
    """Return the file of an SQLite database that may be written; None where there is none."""
    if not isinstance(database, str | bytes | os.PathLike):
        return None
    name = os.fsdecode(database)
    if name.startswith("file:"):
        name, _, options = name.removeprefix("file:").partition("?")
        if re.search(r"mode=(?:ro|memory)|immutable=1", options):
            return None
        name = re.sub("^//[^/]*", "", name)
    return os.path.abspath(name) if name and name != ":memory:" else None


def _calling_frame() -> traceback.FrameSummary | None:
    """Return the script's own line that calls Python's library; None where an installed package does."""
    own = str(Path(__file__).resolve().parents[1]) + os.sep  # may be installed among the packages
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(own):
            continue
        if re.search(r"/(?:site|dist)-packages/", frame.filename):
            return None
        if select_user_frames([frame]):
            return frame
    return None


def _only_reads(command: Any) -> bool:
    """Return whether a command consists of well-known programs that write nothing."""
    if isinstance(command, str | bytes):
        text = os.fsdecode(command)
        if _WRITES_IN_SHELL.search(text):
            return False
        try:
            return all(_only_reads(shlex.split(part)) for part in re.split(r"[|;&]+", text) if part.strip())
        except ValueError:  # an open quote
            return False
    words = [os.fsdecode(word) for word in command]
    name = os.path.basename(words[0]) if words else ""
    if name in ("sh", "bash") and words[1:2] == ["-c"] and len(words) == 3:
        return _only_reads(words[2])
    return name in _READING_PROGRAMS or (name == "git" and words[1:2] != [] and words[1] in _READING_GIT)


def _is_older(path: str, than: float) -> bool:
    """Return whether a path was there before this process began to watch."""
    try:
        return os.lstat(path).st_ctime < than
    except OSError:
        return False
