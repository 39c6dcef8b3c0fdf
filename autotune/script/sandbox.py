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
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.recipe.keras_api import KERAS_PACKAGES
from autotune.runtime import containment
from autotune.runtime.failures import locate_user_line, select_user_frames
from autotune.runtime.sources import describe_line
from autotune.script.interpose import around, replace_everywhere
from autotune.training.boundary import CALLS_PER_EPOCH

_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
}
_TRACKERS = frozenset({"wandb", "mlflow", "neptune", "comet_ml", "clearml", "dvclive", "aim", "swanlab"})
_RESULT_CALLBACKS = frozenset({"ModelCheckpoint", "CSVLogger"})
_OTHER_WRITING_CALLBACKS = frozenset({"BackupAndRestore", "TensorBoard", "RemoteMonitor"})
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
_READING_CALLS = ("stat", "lstat", "access", "chdir", "listdir", "scandir", "readlink", "rmdir")
_CHANGING_CALLS = ("mkdir", "chmod", "utime", "truncate", "setxattr", "removexattr")
_CHANGE_EVENTS: dict[str, tuple[tuple[int, int | None], ...]] = {
    **dict.fromkeys(("open", "os.truncate", "os.setxattr", "os.removexattr"), ((0, None),)),
    **dict.fromkeys(("os.remove", "os.rmdir"), ((0, 1),)),
    "os.chmod": ((0, 2),),
    **dict.fromkeys(("os.chown", "os.utime"), ((0, 3),)),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
}
"""Python's audit events that change files: the index of the path, and the index of its `dir_fd`."""
_REMOVING = frozenset({"os.remove", "os.rmdir"})
_CREATING = frozenset({"open", "os.link", "os.symlink"})
_PROGRAM_EVENTS = {"subprocess.Popen": 1, "os.system": 0, "os.posix_spawn": 1, "os.exec": 1}
"""Audit events that start a program, and the index of its command."""
_READING_PROGRAMS = re.compile("cat|df|free|hostname|ls|lscpu|nproc|nvidia-smi|rocm-smi|uname|wc|which|whoami")
_READING_GIT = frozenset({"describe", "log", "rev-parse", "status"})
_SHELL_CHARACTERS = frozenset("<>|&;`$()\n\\'\"")
CREATED = "created"  # the list of what trials have created, in their folder
_ALLOW = "Write to another file, or pass --allow-writes to let every trial write to it."
_ALLOW_PROGRAM = "Skip it while tuning, or pass --allow-writes to let every trial run it."


def listed_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks that `fit` is given, as a list."""
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []


class SideEffects:
    """The side effects of a script that this process omits in its trial.

    `refuse` takes the error of a write that may not be. It need not return.
    """

    def __init__(self, reference: WorkloadReference, refuse: Callable[[WorkloadError], None]) -> None:
        settings = reference.script or ScriptSettings()
        self.left_out: list[str] = []
        self._writers: list[Any] = []  # callbacks of the last `fit` that write
        self.scratch = Path(settings.scratch or f"{tempfile.gettempdir()}/autotune-scratch-{os.getpid()}")
        """A directory for this process's own files, such as caches; the run removes it."""
        self._allow_writes = settings.allow_writes
        self._watch = WriteWatch(self.scratch, settings.since or time.time(), self._leave_out, refuse)

    def install(self, tf: Any) -> None:
        """Turn off uploads and, where the kernel does not contain this process, saves and other writes.

        Keras's own saves stay until `install_keras`.
        """
        # Trackers stay offline, whatever the user's shell says. MLflow may still load registered models.
        if server := os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_REGISTRY_URI", server)
        os.environ.update(_TRACKERS_OFF, MLFLOW_TRACKING_URI=f"file:{self.scratch}/mlflow")
        if containment.is_active():
            return
        checkpoints = ((tf.train.Checkpoint, "save"), (tf.train.Checkpoint, "write"))
        for owner, name in (*checkpoints, (tf.train.CheckpointManager, "save")):
            setattr(owner, name, self._do_nothing(f"{owner.__name__}.{name}"))
        self._replace(tf.saved_model.save)
        for module in (tf.summary, tf.compat.v2.summary):
            module.create_file_writer = self._do_nothing("tf.summary", tf.summary.create_noop_writer)
        self.watch_writes()

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

    def without_writers(self, callbacks: Any, *, timed: bool = False) -> list[Any]:
        """Return the callbacks of `fit` that do not write. A contained `fit` that is not timed keeps its results.

        It has few steps, so a callback that saves every N of them saves more often.
        """
        keeps_results = containment.is_active() and not timed  # the script may load what its earlier `fit` has saved
        harmless, self._writers = [], []
        for callback in listed_callbacks(callbacks):
            kinds = type(callback).__mro__
            names = {kind.__name__ for kind in kinds}
            saves_results = bool(names & _RESULT_CALLBACKS)
            writes = bool(names & _OTHER_WRITING_CALLBACKS) or any(
                kind.__module__.partition(".")[0] in _TRACKERS for kind in kinds
            )
            if writes or saves_results:
                self._leave_out(type(callback).__name__)
                self._writers.append(callback)
            if not writes and (keeps_results or not saves_results):
                harmless.append(callback)
                if saves_results and isinstance(getattr(callback, "save_freq", None), int):
                    callback.save_freq = min(callback.save_freq, CALLS_PER_EPOCH)
        return harmless

    def time_writers(self, model: Any) -> float | None:
        """Return what the callbacks of the timed `fit` that write take at the end of an epoch; None if one cannot run.

        One that restores, uploads or writes between steps cannot: its training would not go on as it was.
        """
        seconds = 0.0
        for writer in self._writers if containment.is_active() else ():
            names = {kind.__name__ for kind in type(writer).__mro__}
            if not names & _RESULT_CALLBACKS or getattr(writer, "save_freq", "epoch") != "epoch":
                return None
            wanted = re.findall(r"{(\w+)", str(getattr(writer, "filepath", "")))
            logs = dict.fromkeys({*wanted, "loss", str(getattr(writer, "monitor", "loss"))} - {"epoch", "batch"}, 0.0)
            try:
                writer.set_model(model)
                writer.on_train_begin()
                began = time.perf_counter()
                writer.on_epoch_end(0, logs)
                seconds += time.perf_counter() - began
                writer.on_train_end()
            except Exception:  # the user's class may raise anything
                return None
        return seconds or None

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


class WriteWatch:
    """Redirects what this process writes to existing files, renames or removes by Python to files in `folder`.

    Files that the script creates are where it puts them, so that TensorFlow's readers and other programs find them.
    `refuse` takes the error of a change that cannot be redirected. It need not return.
    """

    def __init__(
        self, folder: Path, since: float, leave_out: Callable[[str], None], refuse: Callable[[WorkloadError], None]
    ) -> None:
        self._folder, self._since, self._leave_out, self._refuse = folder, since, leave_out, refuse
        self._temporary = os.path.join(tempfile.gettempdir(), "")
        folders = [self._temporary, "/dev", "/proc", "/sys", sys.prefix, sys.base_prefix, str(folder.parent)]
        folders += [os.path.expanduser(f"~/{name}") for name in (".cache", ".config", ".keras", ".local")]
        here = os.getcwd()
        folders = [path for path in folders if not os.path.join(here, "").startswith(os.path.join(path, ""))]
        self._unwatched = tuple(os.path.join(path, "") for path in (*folders, str(folder)))
        self._new: set[str] = set()  # files and directories that this run's trials have created: the list in `folder`
        with contextlib.suppress(OSError):
            self._new.update((folder / CREATED).read_text(encoding="utf-8").split("\0"))
        self._own: dict[str, str] = {}  # paths in `folder`, which need not exist, by the path that the script names
        self._refused = False

    def install(self) -> None:
        """Wrap Python's functions. An audit hook, which cannot be removed again, refuses what they do not redirect."""
        around(builtins, "open", self._open)
        io.open = builtins.open  # pathlib's
        around(os, "open", self._open_descriptor)
        for name in _READING_CALLS:
            around(os, name, partial(self._call, self._shown))
        for name in _CHANGING_CALLS:
            around(os, name, partial(self._call, self._changed))
        for name in ("remove", "unlink"):
            around(os, name, self._remove)
        for name in ("rename", "replace"):
            around(os, name, self._rename)
        with contextlib.suppress(ImportError):  # Python was built without it
            import sqlite3

            around(sqlite3, "connect", self._connect)
            sqlite3.dbapi2.connect = sqlite3.connect
        sys.addaudithook(self._audit)

    # ------------------------------------------------------------------------------------------ redirected

    def _shown(self, full: str) -> str:
        """Return the path where a file is read: this process's own, if it has changed the file or its directory."""
        path = full
        while self._own and path != os.sep:
            if path in self._own:
                return self._own[path] + full[len(path) :]
            path = os.path.dirname(path)
        return full

    def _changed(self, full: str, *, empty: bool = False) -> str:
        """Return the path where a file is written: a new one in its place, else a copy, made the first time."""
        shown = self._shown(full)
        if shown == full and not os.path.lexists(full) and self._is_watched(full):
            self._create(full)
        is_directory = os.path.isdir(shown)
        if shown != full or is_directory or not self._is_watched(full) or not os.path.isdir(os.path.dirname(full)):
            return shown  # the hook refuses to change a directory
        own = self._new_path()
        if os.path.isfile(full):
            self._leave_out("changes of files that exist")
            if not empty:
                shutil.copy2(full, own)
        self._own[full] = own
        return own

    def _create(self, full: str) -> None:
        """Note a file that is about to be created, also for the trials that come after this one."""
        self._new.add(full)
        os.makedirs(self._folder, exist_ok=True)
        with contextlib.suppress(OSError), (self._folder / CREATED).open("a", encoding="utf-8") as stream:
            stream.write(f"{full}\0")

    def _new_path(self) -> str:
        os.makedirs(self._folder, exist_ok=True)
        return os.path.join(self._folder, f"written-{uuid.uuid4().hex}")

    def _is_watched(self, full: str) -> bool:
        """Return whether a file may be the user's; in the temporary directory, one from before the run."""
        if any(path in self._new for path in (full, *map(str, Path(full).parents))):
            return False
        if full.startswith(self._temporary) and self._temporary in self._unwatched:
            with contextlib.suppress(OSError):
                return os.lstat(full).st_ctime < self._since
            return False
        return not os.path.join(full, "").startswith(self._unwatched) and f"{os.sep}__pycache__{os.sep}" not in full

    def _call(
        self, find: Callable[[str], str], usual: Callable[..., Any], path: Any = ".", *rest: Any, **named: Any
    ) -> Any:
        if isinstance(path, str | bytes | os.PathLike) and named.get("dir_fd") is None:
            full = os.path.abspath(os.fsdecode(path))
            found = find(full)
            path = path if found == full else os.fsencode(found) if isinstance(path, bytes) else found
        return usual(path, *rest, **named)

    def _open(self, usual: Callable[..., Any], file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        find = partial(self._changed, empty="w" in mode) if set(mode) & set("wax+") else self._shown
        return self._call(find, usual, file, mode, *rest, **named)

    def _open_descriptor(self, usual: Callable[..., Any], path: Any, flags: int, *rest: Any, **named: Any) -> int:
        find = self._changed if flags & _WRITE_FLAGS else self._shown
        return int(self._call(find, usual, path, flags, *rest, **named))

    def _remove(self, usual: Callable[..., Any], path: Any, *, dir_fd: int | None = None) -> None:
        full = os.path.abspath(os.fsdecode(path))
        if dir_fd is None and full == self._shown(full) and os.path.isfile(full) and self._is_watched(full):
            self._leave_out("changes of files that exist")
            self._own[full] = self._new_path()
        else:
            self._call(self._shown, usual, path, dir_fd=dir_fd)

    def _rename(self, usual: Callable[..., Any], src: Any, dst: Any, **descriptors: Any) -> None:
        if descriptors:
            usual(src, dst, **descriptors)
            return
        source, target = (os.path.abspath(os.fsdecode(path)) for path in (src, dst))
        if (
            source in self._new
            and self._shown(target) == target
            and (target in self._new or not os.path.lexists(target))
        ):
            usual(source, target)
            for path in [path for path in self._new if path == source or path.startswith(source + os.sep)]:
                self._create(path.replace(source, target, 1))
            return
        usual(self._changed(source), self._changed(target, empty=True))

    def _connect(self, usual: Callable[..., Any], database: Any, *rest: Any, **named: Any) -> Any:
        """Connect to an SQLite database: a new one is this process's own, one that exists is refused by the hook."""
        full = _database_path(database)
        if full is not None and (self._shown(full) != full or not os.path.lexists(full)):
            database = self._changed(full)
            self._create(f"{full}-journal")
        return usual(database, *rest, **named)

    # ------------------------------------------------------------------------------------------ refused

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._refused:
            return
        if event in _PROGRAM_EVENTS:
            self._check_program(arguments[_PROGRAM_EVENTS[event]])
        elif event == "sqlite3.connect":
            if (full := _database_path(arguments[0])) is not None:
                self._check("overwrite", full)
        elif event != "open" or (isinstance(arguments[2], int) and arguments[2] & _WRITE_FLAGS):
            for index, descriptor in _CHANGE_EVENTS.get(event, ()):
                path = arguments[index]
                if path is None or (event == "open" and isinstance(path, int)):
                    continue
                full = _full_path(path, arguments[descriptor] if descriptor is not None else -1)
                there = os.path.lexists(full)
                if not os.path.isdir(os.path.dirname(full)) or (event in _REMOVING and not there):
                    continue  # it fails by itself
                if event == "open" and os.path.isdir(full):
                    continue  # for an unnamed temporary file in it
                if not there and event in _CREATING:
                    if self._is_watched(full):
                        self._create(full)
                    continue
                self._check("overwrite" if event == "open" else "change", full)

    def _check(self, verb: str, full: str) -> None:
        if self._is_watched(full):
            self._refused = True
            self._refuse(WorkloadError(f"{locate_user_line()}: would {verb} {full}", hint=_ALLOW))

    def _check_program(self, command: Any) -> None:
        """Refuse a program that the script itself starts, unless it only reads: its writes cannot be seen."""
        frame = _calling_frame()
        if frame is None or _only_reads(command):
            return
        text = command if isinstance(command, str | bytes) else shlex.join(map(os.fsdecode, command))
        self._refused = True
        what = f"{describe_line(frame.filename, frame.lineno)}: starts `{os.fsdecode(text)[:200]}`"
        why = f"{what}; this machine cannot isolate the files that other programs write"
        self._refuse(WorkloadError(why, hint=_ALLOW_PROGRAM))


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
    name, _, options = os.fsdecode(database).partition("?")
    is_uri = name.startswith("file:")
    if name in ("", ":memory:") or (is_uri and re.search("mode=(?:ro|memory)|immutable=1", options)):
        return None
    return os.path.abspath(re.sub("^file:(?://[^/]*)?", "", name)) if is_uri else os.path.abspath(os.fsdecode(database))


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
    """Return whether a command is one well-known program that writes nothing."""
    if isinstance(command, str | bytes):
        text = os.fsdecode(command)
        words = [] if set(text) & _SHELL_CHARACTERS else text.split()
    else:
        words = [os.fsdecode(word) for word in command]
    if words[:2] == ["/bin/sh", "-c"]:
        return len(words) == 3 and _only_reads(words[2])
    if any(word.startswith("--output") for word in words):
        return False
    name = os.path.basename(words[0]) if words else ""
    return bool(_READING_PROGRAMS.fullmatch(name)) or (name == "git" and words[1:2] != [] and words[1] in _READING_GIT)
