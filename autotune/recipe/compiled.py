"""Keep what XLA compiles while a run lasts, and what the winner's processes have loaded for the long training.

    scratch-compiled/…/       what the search has compiled with equal settings, while the run lasts
    trials/0012/compiled-0/   what the first process of a leader compiled and its others load, while the run lasts
    compiled/                 that of the winner, with a seal

XLA chooses kernels by timing them, so another compilation may choose others than those that were measured. Compiled
programs are machine code, and a run directory may come from other people. They are loaded only if the seal is by this
user's own key, and the machine is like the one that compiled them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Literal

from pydantic import Field

from autotune.data.errors import RunDirectoryError
from autotune.data.facts import Machine
from autotune.data.files import make_scratch, read_at_most, write_atomically
from autotune.data.models import Value
from autotune.data.printable import one_line
from autotune.data.record import Outcome, Place
from autotune.data.run_directory import COMPILED, SHARED
from autotune.recipe.evidence import Part, RecipeContent
from autotune.recipe.guard import say
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Stage
from autotune.space.variables import CacheUse

SEAL = "seal.json"
MOST_BYTES, MOST_FILES = 200 << 20, 1000
MOST_SHARED_BYTES = 1 << 30
_LARGEST_SEAL_BYTES = 1 << 16
_KEY_BYTES = 32
_PROGRAM_FILE = "xla_compile_cache"  # TensorFlow's name for a file of its cache begins so
_ACTING_VARIABLES = ("TF_", "XLA_", "CUDA_", "CUDNN_", "NVIDIA_", "OMP_", "KMP_")
_OF_PIPELINE = (Stage.PIPELINE, Stage.OPTIONS, Stage.COMPILE, Stage.OPTIMIZER)  # what XLA compiles shows the others


class Seal(Part):
    """The configuration and machine of compiled programs, and the proof that this user's run has compiled them."""

    schema_version: Literal[1]
    configuration: dict[str, Value]
    machine: dict[str, str]
    mac: str = Field(pattern="^[0-9a-f]{64}$", description="HMAC-SHA256 over all else and the files.")


# -------------------------------------------------------------------------------------- while the run lasts


class Compilations:
    """Folders of what processes of a run compile, which others load.

    TensorFlow fails on a damaged file, so all are checked before a process may load them.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._digests: dict[str, dict[str, str]] = {}  # of the files, by folder
        self._compiling_seconds: dict[str, float] = {}  # to the first step of the latest process that compiled there
        self.is_on = True

    def _check(self, folder: str) -> bool:
        """Note the files that a folder holds now; return whether those that were known are as they were."""
        found, known = _digests_of(folder), self._digests.get(folder, {})
        self._digests[folder] = found
        if is_damaged := any(found.get(name) != digest for name, digest in known.items()):
            self._say(f"{folder}: what XLA compiled is damaged, and is compiled again")
        return not is_damaged

    def may_fail(self, folder: str, outcome: Outcome, text: str) -> bool:
        """Return whether a process may have ended so, and said so, because of what it loaded or could not keep."""
        loaded = outcome in (Outcome.CRASHED, Outcome.ERROR) and bool(self._digests.get(folder))
        return bool(folder) and (loaded or _PROGRAM_FILE in text)

    def turn_off(self, why: str) -> None:
        """Have all later processes compile for themselves."""
        self.is_on = False
        self._say(one_line(f"trials compile for themselves from now on: {why}", longest=300))


class SharedCompilations(Compilations):
    """Compilations of a search: a later process with equal settings loads them instead of compiling.

    TensorFlow finds a program by what it computes, its name and the kind of device. All else that decides how it is
    compiled names the folder.
    """

    def __init__(self, run: Path, machine: Machine, say: Callable[[str], object]) -> None:
        super().__init__(say)
        self._directory, self._machine = run.resolve() / SHARED, machine
        self._new: dict[str, set[str]] = {}  # files that the latest process has compiled, by folder

    def folder_for(self, configuration: Configuration, place: Place) -> str:
        """Return the folder for a process; empty where XLA compiles nothing, or what it compiles cannot be kept."""
        by_xla = configuration.get("jit_compile"), configuration.get("xla_auto_clustering")
        if not self.is_on or not (True in by_xla or (self._machine.gpus and "auto" in by_xla)):
            return ""
        variables = {name: text for name, text in os.environ.items() if name.startswith(_ACTING_VARIABLES)}
        knobs = {name: value for name, value in configuration.items() if KNOBS[name].stage not in _OF_PIPELINE}
        settings = [_facts_of(self._machine), self._machine.packages, variables, knobs, place.model_dump()]
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        folder = str(self._directory / name[:16])
        try:
            if not self._digests:
                self._directory.mkdir(mode=0o700)  # fails where it exists: its files would be somebody else's
            if folder not in self._digests:
                os.mkdir(folder, mode=0o700)
            is_whole = self._check(folder)
            if not is_whole or sum(file.stat().st_size for file in self._directory.glob("*/*")) > MOST_SHARED_BYTES:
                self._digests[folder] = {}
                for file in Path(folder).iterdir():
                    file.unlink()
        except OSError as error:
            self.turn_off(str(error))
            return ""
        return folder

    def note_start(self, folder: str, first_step_seconds: float) -> float | None:
        """Note what a process has compiled; return the seconds that it has saved, None where it compiled itself."""
        found = _digests_of(folder)
        self._new[folder] = found.keys() - self._digests[folder].keys()
        self._digests[folder] = found
        if self._new[folder] or folder not in self._compiling_seconds:
            self._compiling_seconds[folder] = first_step_seconds
            return None
        return max(0.0, self._compiling_seconds[folder] - first_step_seconds)

    def forget_latest(self, folder: str) -> None:
        """Remove what the latest process has compiled."""
        for name in self._new.pop(folder, ()):
            Path(folder, name).unlink(missing_ok=True)
            del self._digests[folder][name]


class ConfirmedCompilations(Compilations):
    """Compilations of a confirmation: some processes of a side compile, the others load exactly that, and add nothing.

    So a claim is about the program that the long training loads. A side is a configuration, or the trial of the
    baseline's processes beside a leader.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__(say)
        self._loads: dict[object, Counter[str]] = {}  # of each folder of a side
        self._opened: dict[str, tuple[object, int]] = {}  # the side of each folder, and how many it may have

    def carry(self, side: object, folder: Path, compile_seconds: float) -> None:
        """Have all processes of a side load what a recipe carries."""
        self._opened[str(folder)], self._loads[side] = (side, 1), Counter({str(folder): 0})
        self._compiling_seconds[str(folder)] = compile_seconds
        self._check(str(folder))

    def has(self, side: object, most: int) -> bool:
        """Return whether the next process of a side loads what another has compiled."""
        return self.is_on and len(self._loads.get(side, ())) >= most

    def folder_for(self, side: object, most: int, trial_directory: Path, process: int) -> tuple[str, CacheUse]:
        """Return the folder that a process loads, or one that takes what it compiles, as `most` of its side do."""
        loads = self._loads.setdefault(side, Counter())
        for folder in [folder for folder in loads if not self._check(folder)]:
            self._drop(folder)
        if self.has(side, most):
            folder, _ = min(loads.items(), key=itemgetter(1))
            loads[folder] += 1
            return folder, "loaded"
        folder = open_folder(trial_directory, process) if self.is_on else ""
        self._opened[folder] = side, most
        return folder, "written"

    def note_start(self, folder: str, first_step_seconds: float) -> float | None:
        """Keep what a process has compiled, unless others have meanwhile; return the seconds saved, None if it did."""
        side, most = self._opened[folder]
        loads = self._loads[side]
        if folder in loads:
            return max(0.0, self._compiling_seconds[folder] - first_step_seconds)
        if self._check(folder) and self._digests[folder]:
            loads[folder], self._compiling_seconds[folder] = 0, first_step_seconds
            if len(loads) > most:
                self._drop(folder)
        return None

    def forget_latest(self, folder: str) -> None:
        """Remove what a process has compiled, unless another has loaded it."""
        if self._loads[self._opened[folder][0]].get(folder) == 0:
            self._drop(folder)

    def turn_off(self, why: str) -> None:
        """See `Compilations`; the long training loads none of it either."""
        super().turn_off(why)
        for folder in [folder for loads in self._loads.values() for folder in loads]:
            self._drop(folder)

    def _drop(self, folder: str) -> None:
        del self._loads[self._opened[folder][0]][folder], self._digests[folder]
        shutil.rmtree(folder, ignore_errors=True)


def _digests_of(folder: str) -> dict[str, str]:
    """Return the digest of each whole file in a folder, by name."""
    found = {}
    with contextlib.suppress(OSError):  # then what was known is missing, which is damage
        for file in Path(folder).glob("*.pb"):
            found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def open_folder(trial_directory: Path, process: int) -> str:
    """Make an empty folder for what a process of a trial compiles; return its path, empty where it cannot be made."""
    folder = trial_directory.resolve() / f"{COMPILED}-{process}"
    shutil.rmtree(folder, ignore_errors=True)  # of an invocation that was killed
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        return ""
    return str(folder)


def keep_compiled(recipe: RecipeContent, run: Path) -> str:
    """Keep what a confirming process of the winner compiled beside the recipe of a run, and remove all else.

    Files of an earlier invocation stay if they are of this recipe. Returns why nothing is kept, or an empty text.
    """
    try:
        return _keep_last(recipe, run, run / COMPILED)
    except (OSError, RunDirectoryError) as error:
        shutil.rmtree(run / COMPILED, ignore_errors=True)
        return one_line(f"compilations are not kept: {error}", longest=300)
    finally:
        for folder in run.glob(f"trials/*/{COMPILED}-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _keep_last(recipe: RecipeContent, run: Path, kept: Path) -> str:
    """Do as `keep_compiled`, and leave the folders of the trials. Raises OSError, RunDirectoryError."""
    trials = recipe.evidence.confirmation.trials
    made = run.glob(f"trials/{trials[-1]:04d}/{COMPILED}-*") if recipe.changes and trials else ()
    by_process = {int(number): path for path in made if (number := path.name.rpartition("-")[2]).isdecimal()}
    folder = by_process[max(by_process)] if by_process else None
    files = _read_files(folder) if folder else {}
    if not files and recipe.changes:
        with contextlib.suppress(OSError, ValueError):
            if _read_seal(kept).configuration == dict(recipe.configuration):
                return ""
    shutil.rmtree(kept, ignore_errors=True)
    if folder is None or not files:
        return ""
    key = _user_key(make=True)
    if key is None:
        where = _state_directory() or "the home directory, which is not known"
        return f"compilations are not kept: no private file can be written in {where}"
    folder.rename(kept)
    facts = _facts_of(recipe.machine)
    unsigned = Seal(schema_version=1, configuration=dict(recipe.configuration), machine=facts, mac="0" * 64)
    seal = unsigned.model_copy(update={"mac": _mac(unsigned, files, key)})
    write_atomically(kept / SEAL, seal.model_dump_json(indent=2) + "\n")
    return ""


# ------------------------------------------------------------------------------------- in the long training


def load_compiled(
    recipe: RecipeContent, folder: Path | None, here: Machine, say: Callable[[str], object] = say
) -> Path | None:
    """Copy what was compiled for a recipe in a folder to a private directory, and say so; return that directory."""
    if folder is None or not recipe.changes or not os.path.lexists(kept := folder / COMPILED):
        return None
    try:
        seal = _read_seal(kept)
        if seal.configuration != dict(recipe.configuration) or seal.machine != _facts_of(here):
            return None  # a change of the machine is said elsewhere
        files, key = _read_files(kept), _user_key()
        if key is None or not hmac.compare_digest(seal.mac, _mac(seal, files, key)):
            say(one_line(f"{kept} is not used: no run of yours made it as it is. XLA compiles anew"))
            return None
        copy = make_scratch("autotune-compiled-") / COMPILED
        copy.mkdir(mode=0o700)
        for name, content in files.items():
            (copy / name).write_bytes(content)
    except (OSError, ValueError):
        say(one_line(f"{kept} is not used: it is damaged, or cannot be copied. XLA compiles anew"))
        return None
    say(one_line(f"loading what XLA compiled when the recipe was measured ({kept})"))
    return copy


# ------------------------------------------------------------------------------------------------ the seal


def _read_seal(kept: Path) -> Seal:
    """Read a seal. Raises OSError, and ValueError where it is damaged."""
    return Seal.model_validate_json(read_at_most(kept / SEAL, _LARGEST_SEAL_BYTES))


def _mac(seal: Seal, files: Mapping[str, bytes], key: bytes) -> str:
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    signed = [seal.model_dump(mode="json", exclude={"mac"}), digests]
    return hmac.new(key, json.dumps(signed, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _facts_of(machine: Machine) -> dict[str, str]:
    """Return the facts of a machine that compiled programs depend on."""
    libraries = set()  # NVIDIA's, such as cuDNN: a program names its algorithms by their numbers
    for package in metadata.distributions() if machine.gpus else ():
        with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):  # left by a broken uninstall
            if package.name.startswith("nvidia"):
                libraries.add(f"{package.name} {package.version}")
    return {
        "cpu": machine.cpu,
        "gpus": ", ".join(sorted({gpu.name for gpu in machine.gpus})),
        "driver": machine.driver or "",
        "tensorflow": machine.packages.get("tensorflow", ""),
        "libraries": ", ".join(sorted(libraries)),
    }


def _read_files(folder: Path) -> dict[str, bytes]:
    """Read the files of a folder but its seal. Raises OSError where it holds anything else, or too much."""
    files: dict[str, bytes] = {}
    left = MOST_BYTES
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder} is a link")
    for path in sorted(folder.iterdir()):
        if path.name == SEAL:
            continue
        if path.is_symlink() or len(files) == MOST_FILES:
            raise OSError(errno.EINVAL, f"{folder} holds a link, or more than {MOST_FILES:,} files")
        content = read_at_most(path, left)
        left -= len(content)
        if left < 0:
            raise OSError(errno.EFBIG, f"they are larger than {MOST_BYTES >> 20} MiB")
        files[path.name] = content
    return files


def _state_directory() -> Path | None:
    """Return where this user's state is; None where the home directory is not known. Never below the working one."""
    for given in (os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state")):
        if os.path.isabs(given):
            return Path(given) / "autotune"
    return None


def _user_key(*, make: bool = False) -> bytes | None:
    """Return the key that this user alone can read; None where there is none.

    `make`: where none can be used, such as an emptied file or one that others can read, a new one takes its place.
    """
    directory = _state_directory()
    if directory is None:
        return None
    file = directory / "key"
    with contextlib.suppress(OSError):
        if make and _read_key(file) is None:
            file.unlink(missing_ok=True)
            _make_key(file)
        return _read_key(file)
    return None


def _read_key(file: Path) -> bytes | None:
    """Return a key; None where the file is no private file of this user with a whole key."""
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            found, key = os.fstat(descriptor), stream.read(_KEY_BYTES + 1)
        is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if is_private and len(key) == _KEY_BYTES:
            return key
    return None


def _make_key(file: Path) -> None:
    """Write a new key whole, unless another process has done so meanwhile. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unnamed = file.with_name(f".key.{secrets.token_hex(8)}")
    try:
        with open(os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(unnamed, file)
    finally:
        unnamed.unlink()
