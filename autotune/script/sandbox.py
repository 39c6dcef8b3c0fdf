"""Keeps what a script writes out of its trials: saves do nothing, and files that exist are not written over.

Where the kernel contains trials (see `containment`), files are none of this module's concern: only uploads are off.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.data.run_directory import SCRATCH
from autotune.runtime import containment
from autotune.runtime.created_files import identity_of, read_created
from autotune.runtime.failures import select_user_frames
from autotune.script.interpose import around, replace_everywhere

_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
}
_WRITING_CALLBACKS = frozenset({"ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger", "RemoteMonitor"})
_RESULT_CALLBACKS = frozenset({"ModelCheckpoint", "CSVLogger"})
_TRACKERS = frozenset({"wandb", "mlflow", "neptune", "comet_ml", "clearml", "dvclive", "aim", "swanlab"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
_MAKING = ("open", "os.mkdir", "os.link", "os.symlink")
_PATHS: dict[str, tuple[tuple[str, int, int | None], ...]] = {
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
"""Python's audit events that change files: what each does to the argument at an index, and where its `dir_fd` is."""
_PROGRAMS = {"subprocess.Popen": 1, "os.system": 0, "os.posix_spawn": 1, "os.exec": 1}
"""Audit events that start a program, and which argument is its command."""
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
ALLOW = "Have the script write elsewhere, or pass --allow-writes if each trial may write to it."
ALLOW_PROGRAM = "Have the script skip it while tuning, or pass --allow-writes if each trial may run it."


def listed_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks that `fit` is given, as a list."""
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []


def _writes_files(callback: Any, *, saves: bool) -> bool:
    """Whether a callback of `fit` writes files, or to an experiment tracker; `saves` permits files of results."""
    kinds, writing = type(callback).__mro__, _WRITING_CALLBACKS - (_RESULT_CALLBACKS if saves else frozenset())
    return any(kind.__name__ in writing or kind.__module__.partition(".")[0] in _TRACKERS for kind in kinds)


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
        self._left = read_created(self._created_file)  # what trials have made, as they left it
        self._made: set[str] = set()  # by this process
        self._training = False
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
        if containment.is_active():
            return
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
        if not self._allow_writes and not containment.is_active():
            around(builtins, "open", self._opened)
            io.open = builtins.open  # pathlib's
            for name in ("chmod", "utime", "setxattr"):  # `shutil.copy` sets them on the file that it has written
                around(os, name, self._changed)
            self._watch_databases()
            sys.addaudithook(self._audit)

    def without_writers(self, callbacks: Any, *, timed: bool = False) -> list[Any]:
        """Return the callbacks of `fit` that do not write; a contained `fit` that is not timed saves as usual."""
        given = listed_callbacks(callbacks)
        for callback in given:
            if _writes_files(callback, saves=False):
                self._leave_out(type(callback).__name__)
        saves = containment.is_active() and not timed  # the script may load what its earlier `fit` has saved
        return [callback for callback in given if not _writes_files(callback, saves=saves)]

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

    def training_begins(self) -> None:
        """Record what this process has made. From now on, new files go to the scratch directory as well."""
        if containment.is_active():
            return
        self._training = True
        self._inside = True
        try:
            found = {path: identity for path in self._made if (identity := identity_of(path)) is not None}
            new = {path: identity for path, identity in found.items() if self._left.get(path) != identity}
            self._left.update(new)
            with self._created_file.open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps([path, *identity]) + "\n" for path, identity in new.items())
        except OSError:
            pass  # the run directory is gone: then nothing is removed either
        finally:
            self._inside = False

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

        def moved(
            event: str, usual: Callable[..., Any], src: Any, dst: Any, overwrite: bool = False, **named: Any
        ) -> Any:
            if event:
                self._writes(event, src)
            if overwrite or not tf.io.gfile.exists(dst):  # otherwise TensorFlow refuses
                self._writes("open", dst)
            return usual(src, dst, overwrite, **named)

        def saved(usual: Callable[..., Any], dataset: Any, path: Any, *arguments: Any, **named: Any) -> Any:
            if os.path.exists(os.fspath(path)):
                self._writes("shutil.rmtree", path)
            self._writes("os.mkdir", path)
            return usual(dataset, path, *arguments, **named)

        around(tf.io.TFRecordWriter, "__init__", writer)
        around(tf.io.gfile.GFile, "__init__", opened)
        if "h5py" in sys.modules:
            around(sys.modules["h5py"].File, "__init__", opened)
        around(tf.io, "write_file", partial(said, "open"))
        around(tf.data.Dataset, "save", saved)
        for name, event in (
            ("makedirs", "os.mkdir"),
            ("mkdir", "os.mkdir"),
            ("remove", "os.remove"),
            ("rmtree", "shutil.rmtree"),
        ):
            around(tf.io.gfile, name, partial(said, event))
        for name, event in (("rename", "os.rename"), ("copy", "")):
            around(tf.io.gfile, name, partial(moved, event))

    def _watch_databases(self) -> None:
        """Give this process a copy of its own of each SQLite database that exists."""
        try:
            import sqlite3
        except ImportError:  # Python was built without it
            return
        usual = sqlite3.connect

        def connect(database: Any, *arguments: Any, **named: Any) -> Any:
            full = _database_path(database)
            if full is not None and not self._inside and full not in self._instead and self._keeps(full):
                self._leave_out("SQLite databases that exist")
                self._inside = True
                try:
                    with contextlib.closing(usual(f"{Path(full).as_uri()}?mode=ro", uri=True)) as original:
                        own = self._own_file()
                        with contextlib.closing(usual(own)) as copy:
                            original.backup(copy)
                        self._instead[full] = own
                finally:
                    self._inside = False
            return usual(self._instead.get(full or "", database), *arguments, **named)

        sqlite3.connect = sqlite3.dbapi2.connect = connect

    def _own_file(self) -> str:
        """Choose a file in the scratch directory for this process."""
        self.scratch.mkdir(exist_ok=True)
        return str(self.scratch / f"written-{os.getpid()}-{len(self._instead)}")

    def _opened(self, usual: Callable[..., Any], file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        """Open a file; what is written to one that exists goes to the scratch directory, and is read there."""
        if isinstance(file, str | bytes | os.PathLike) and not self._inside:
            full = os.path.abspath(os.fsdecode(file))
            kind = mode.lstrip("bt")[:1]
            if kind in ("w", "a") and full not in self._instead and self._goes_elsewhere(full, kind):
                own = self._own_file()
                if os.path.isfile(full):
                    self._leave_out("open() of files that exist")
                    if kind == "a":
                        shutil.copyfile(full, own)
                self._instead[full] = own
            file = self._instead.get(full, file)
        return usual(file, mode, *arguments, **named)

    def _changed(self, usual: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> Any:
        """Change the mode or times of a file; of one that goes elsewhere, there."""
        if isinstance(path, str | bytes | os.PathLike):
            path = self._instead.get(os.path.abspath(os.fsdecode(path)), path)
        return usual(path, *arguments, **named)

    def _goes_elsewhere(self, full: str, kind: str) -> bool:
        """Whether what is written to a file belongs in the scratch directory.

        A new file that is appended to is a log. One written once training has begun is read by nobody.
        """
        if os.path.isfile(full):
            return self._keeps(full) or (self._training and self._is_own(full))
        new = not os.path.lexists(full) and os.path.isdir(os.path.dirname(full))
        return new and (self._training or kind == "a") and not full.startswith(self._others)

    def _keeps(self, full: str) -> bool:
        """Whether a file exists that is not the trials' own to change."""
        if not os.path.isfile(full) or self._is_own(full):
            return False
        if full.startswith(self._temporary) and self._temporary in self._others:
            return _is_older(full, self._began)
        return not full.startswith(self._others)

    def _is_own(self, full: str) -> bool:
        """Whether a trial has made this file or directory, and nobody else has changed it since."""
        if full in self._left:
            return identity_of(full) == self._left[full]
        return full in self._made

    def _writes(self, event: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and "://" not in str(path):
            self._look(event, os.path.abspath(os.fspath(path)))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside:
            return
        if event in _PROGRAMS:
            self._look_at_program(arguments[_PROGRAMS[event]])
            return
        if event == "sqlite3.connect":
            full = _database_path(arguments[0])
            if full is not None and full not in self._instead.values():
                self._look("open", full)
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        for change, index, directory in _PATHS.get(event, ()):
            path = arguments[index]
            if path is None or (event == "open" and isinstance(path, int)):
                continue
            within = arguments[directory] if directory is not None and len(arguments) > directory else -1
            self._look(change, _full_path(path, within))

    def _look(self, event: str, full: str) -> None:
        """Note what is made, and refuse what is not the trials' own to change."""
        if self._is_own(full):
            self._made.add(full)
            return
        making = event in _MAKING
        if full.startswith(self._temporary):
            if not making and _is_older(full, self._began):
                self._refuse_change(event, full)
            if event == "os.mkdir" and not os.path.exists(full):  # another trial may remove it
                self._made.add(full)
        if full.startswith(self._others) or f"{os.sep}__pycache__{os.sep}" in full:
            return
        if not os.path.lexists(full):
            if making:  # one call may make its parents as well
                self._made.update(path for path in (full, *map(str, Path(full).parents)) if not os.path.exists(path))
            return
        if making and (event != "open" or not os.path.isfile(full)):
            return
        if not making and (below := list(_files_below(full))) and all(map(self._is_own, below)):
            return
        self._refuse_change(event, full)

    def _look_at_program(self, command: Any) -> None:
        """Refuse a program that the script itself starts, unless it only reads: what it writes cannot be followed."""
        frame = _calling_frame()
        if frame is None or _only_reads(command):
            return
        text = command if isinstance(command, str | bytes) else shlex.join(map(os.fsdecode, command))
        self._inside = True
        self._refuse(
            WorkloadError(
                f"{frame.filename}, line {frame.lineno}: starts `{os.fsdecode(text)[:200]}`, and what another program "
                "writes cannot be kept out of trials here",
                hint=ALLOW_PROGRAM,
            )
        )

    def _refuse_change(self, event: str, full: str) -> None:
        frame = select_user_frames(traceback.extract_stack())[-1:]
        where = f"{frame[0].filename}, line {frame[0].lineno}" if frame else "a package"
        verb = "writes to" if event == "open" else "changes"
        self._inside = True
        self._refuse(WorkloadError(f"{where}: {verb} {full}, which exists", hint=ALLOW))


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
    """Whether a command is made of well-known programs that write nothing."""
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
    """Whether something is there that was there before this process began to watch."""
    try:
        return os.lstat(path).st_ctime < than
    except OSError:
        return False


def _files_below(directory: str) -> Iterator[str]:
    return (os.path.join(root, each) for root, _, files in os.walk(directory) for each in files)
