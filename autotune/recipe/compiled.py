"""Keep what XLA compiled in a confirming process of the winner, and load it in the long training.

    trials/0012/compiled-3/   what the fourth process of a leader compiled, while the run lasts
    compiled/                 that of one of the winner's processes, with a seal

XLA chooses kernels by timing them, so another process may choose others than those that were measured. Compiled
programs are machine code, and a run directory may come from other people. They are loaded only if the seal is by this
user's own key, and the machine is like the one that compiled them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from autotune.data.errors import RunDirectoryError
from autotune.data.facts import Machine
from autotune.data.files import read_at_most, write_atomically
from autotune.data.models import Value
from autotune.data.printable import one_line
from autotune.data.run_directory import COMPILED
from autotune.machine.scratch import make_scratch
from autotune.recipe.evidence import Part

if TYPE_CHECKING:
    from autotune.recipe.recipe import Recipe

SEAL = "seal.json"
MOST_BYTES, MOST_FILES = 200 << 20, 1000
_LARGEST_SEAL_BYTES = 1 << 16
_KEY_BYTES = 32


class Seal(Part):
    """What was compiled, for which machine, and the proof that this user's run has compiled it."""

    schema_version: Literal[1]
    configuration: dict[str, Value]
    machine: dict[str, str]
    mac: str = Field(pattern="^[0-9a-f]{64}$", description="HMAC-SHA256 over all else and the files.")


class Loaded(NamedTuple):
    """A private copy of what was compiled, None where there is none to load; and a line for the user."""

    folder: Path | None = None
    text: str = ""


# -------------------------------------------------------------------------------------- while the run lasts


def open_folder(trial_directory: Path, process: int) -> str:
    """Make an empty folder for what a process of a trial compiles; return its path, empty where it cannot be made."""
    folder = trial_directory.resolve() / f"{COMPILED}-{process}"
    shutil.rmtree(folder, ignore_errors=True)  # of an invocation that was killed
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        return ""
    return str(folder)


def drop_older_folders(trial_directory: Path) -> None:
    """Remove what all processes of a trial but the last have compiled."""
    for folder in _folders(trial_directory)[:-1]:
        shutil.rmtree(folder, ignore_errors=True)


def _folders(trial_directory: Path) -> list[Path]:
    """Return a trial's folders of compilations, the oldest first."""
    found = [path for path in trial_directory.glob(f"{COMPILED}-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def keep_compiled(recipe: Recipe, run: Path) -> str:
    """Keep what the last confirming process of the winner compiled beside the recipe of a run, and remove all else.

    What an earlier invocation kept stays if it is of this recipe. Returns why nothing is kept, or an empty text.
    """
    try:
        return _keep_last(recipe, run, run / COMPILED)
    except (OSError, RunDirectoryError) as error:
        shutil.rmtree(run / COMPILED, ignore_errors=True)
        return one_line(f"compilations are not kept: {error}", longest=300)
    finally:
        for folder in run.glob(f"trials/*/{COMPILED}-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _keep_last(recipe: Recipe, run: Path, kept: Path) -> str:
    """Do as `keep_compiled`, and leave the folders of the trials. Raises OSError, RunDirectoryError."""
    trials = recipe.evidence.confirmation.trials
    folders = _folders(run / "trials" / f"{trials[-1]:04d}") if recipe.changes and trials else []
    files = _read_files(folders[-1]) if folders else {}
    if not files and recipe.changes:
        with contextlib.suppress(OSError, ValueError):
            if _read_seal(kept).configuration == dict(recipe.configuration):
                return ""
    shutil.rmtree(kept, ignore_errors=True)
    if not files:
        return ""
    key = _user_key(make=True)
    if key is None:
        where = _state_directory() or "the home directory, which is not known"
        return f"compilations are not kept: no private file can be written in {where}"
    folders[-1].rename(kept)
    facts = _facts_of(recipe.machine)
    unsigned = Seal(schema_version=1, configuration=dict(recipe.configuration), machine=facts, mac="0" * 64)
    seal = unsigned.model_copy(update={"mac": _mac(unsigned, files, key)})
    write_atomically(kept / SEAL, seal.model_dump_json(indent=2) + "\n")
    return ""


# ------------------------------------------------------------------------------------- in the long training


def load_compiled(recipe: Recipe, beside: Path, here: Machine) -> Loaded:
    """Copy what was compiled for a recipe, whose file is in `beside`, to a private directory of this process."""
    kept = beside / COMPILED
    if not recipe.changes or not os.path.lexists(kept):
        return Loaded()
    try:
        seal = _read_seal(kept)
        if seal.configuration != dict(recipe.configuration) or seal.machine != _facts_of(here):
            return Loaded()  # a change of the machine is said elsewhere
        files, key = _read_files(kept), _user_key()
        if key is None or not hmac.compare_digest(seal.mac, _mac(seal, files, key)):
            return Loaded(text=one_line(f"{kept} is not used: no run of yours made it as it is. XLA compiles anew"))
        scratch = make_scratch("autotune-compiled-")
        atexit.register(_remove_copy, scratch, os.getpid())
        folder = scratch / COMPILED
        folder.mkdir(mode=0o700)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except (OSError, ValueError):
        return Loaded(text=one_line(f"{kept} is not used: it is damaged, or cannot be copied. XLA compiles anew"))
    return Loaded(folder, one_line(f"loading what XLA compiled when the recipe was measured ({kept})"))


def _remove_copy(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a fork ends before the training does
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ the seal


def _read_seal(kept: Path) -> Seal:
    """Read a seal. Raises OSError, and ValueError where it is damaged."""
    return Seal.model_validate_json(read_at_most(kept / SEAL, _LARGEST_SEAL_BYTES))


def _mac(seal: Seal, files: Mapping[str, bytes], key: bytes) -> str:
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    signed = [seal.model_dump(mode="json", exclude={"mac"}), digests]
    return hmac.new(key, json.dumps(signed, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _facts_of(machine: Machine) -> dict[str, str]:
    """Return what compiled programs depend on."""
    return {
        "cpu": machine.cpu,
        "gpus": ", ".join(sorted({gpu.name for gpu in machine.gpus})),
        "driver": machine.driver or "",
        "tensorflow": machine.packages.get("tensorflow", ""),
        "libraries": _libraries() if machine.gpus else "",
    }


def _libraries() -> str:
    """Return NVIDIA's installed packages, such as cuDNN: a program names its algorithms by their numbers."""
    found = set()
    for package in metadata.distributions():
        with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):  # left by a broken uninstall
            if package.name.startswith("nvidia"):
                found.add(f"{package.name} {package.version}")
    return ", ".join(sorted(found))


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
