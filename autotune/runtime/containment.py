"""Keep what trials write away from the user's files: a mount namespace with an overlay over every writable mount.

The template enters namespaces while it has one thread. Its root directory becomes a tree in which each writable mount
is an overlay: the real file system below, a layer above. Each of its forks gets a mount namespace and layers of its
own, in the run directory. The layers of a process with forks are in memory: its forks read them, and an overlay takes
no two layers of one file system of which one lies in the other. `/proc`, `/dev`, `/sys`, `/run` and caches of downloads
stay real.

Root mounts in the present user namespace. Others make a user namespace, in which their own id stands for itself. There
the kernel refuses an overlay over a directory below which something is mounted: its entries are overlaid one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

LARGEST_LAYER_BYTES = 16 << 30
ALLOW_LARGE = "Have it write less before it trains. For a script, --allow-writes lets each trial write to your files."
_LIBC = ctypes.CDLL(None, use_errno=True)
_MEMORY_SHARE = 0.1  # of the machine's, for layers in memory where the run directory cannot hold them
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_BIND, _REC, _SLAVE, _DETACH = 4096, 16384, 1 << 19, 2
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY = 442, 0x8000, 1
_SYS_ADMIN = 1 << 21
_CAPABILITIES_VERSION = 0x20080522
_UNTOUCHED = ("/proc", "/dev", "/sys", "/run")
_UNTOUCHED_KINDS = frozenset(
    ("proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "autofs", "nsfs", "hugetlbfs", "fusectl")
)
_CACHE_VARIABLES = ("KERAS_HOME", "HF_HOME", "TFDS_DATA_DIR", "TFHUB_CACHE_DIR", "CUDA_CACHE_PATH")
_CACHES = ("~/.keras", "~/.cache/huggingface", "~/.cache/kagglehub", "~/tensorflow_datasets", "~/.nv")
_MPS_VARIABLE, _MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # sockets, which an overlay would cut off


class _Mount(NamedTuple):
    path: str
    kind: str
    read_only: bool


@dataclass(frozen=True, kw_only=True)
class _Contained:
    """The state that a contained process needs to give its forks their own layers."""

    real_root: int  # descriptor
    mounts: tuple[_Mount, ...]
    layers: str
    own_user_namespace: bool
    # By overlaid directory: layers below those of the forks, the newest first.
    written: dict[str, tuple[str, ...]] = field(default_factory=dict)


_contained: _Contained | None = None


def is_active() -> bool:
    """Return whether this process is contained."""
    return _contained is not None


def why_unavailable(layers: Path) -> str:
    """Try to contain a fork of this process; return why that fails, empty where it works."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent do not matter to this child
        pid = os.fork()
    if pid == 0:
        why = "it was killed"
        try:
            why = _enter(str(layers))
        except BaseException as error:  # said by the parent
            why = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, why.encode()[:4000])
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        why = stream.read().decode(errors="replace")
    os.waitpid(pid, 0)
    remove_all_layers(layers)
    return why


def contain(layers: Path) -> str:
    """Contain this process, which must have one thread; return why that is not possible, empty where it is."""
    why = why_unavailable(layers)
    return why or _enter(str(layers))


def _enter(layers: str) -> str:
    global _contained
    try:
        mounts = tuple(_mounts(layers))
        effective, _ = _capabilities()
        own = not effective & _SYS_ADMIN
        if own:
            _enter_user_namespace()
        else:
            call_libc("unshare", _NEW_MOUNTS)
        _mount(None, "/", None, _REC | _SLAVE)  # what an automounter mounts later arrives
        real_root = os.open("/", os.O_PATH | os.O_DIRECTORY)
        contained = _Contained(real_root=real_root, mounts=mounts, layers=layers, own_user_namespace=own)
        made = _enter_layers(contained, [layers], os.getcwd(), ("memory", "disk"))
        contained = replace(contained, written={path: (layer,) for path, layer in made.items()})
        if own and os.geteuid() != 0:
            _, permitted = _capabilities()
            _set_capabilities(0, permitted)  # for `renew`; the user's code has none
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    _contained = contained
    return ""


def renew(writable: Sequence[str] = (), *, more_later: bool = False, for_forks: bool = False) -> None:
    """Give this fork of a contained process layers of its own. Does nothing where the process is not contained.

    Args:
        writable: Real directories that stay writable, such as the one that holds the trial's log.
        more_later: Keep what `make_writable` needs.
        for_forks: This process has forks, which read what it writes: its layers are in memory, as the template's.

    Raises:
        OSError: The kernel has refused what it did for the template.
    """
    global _contained
    contained = _contained
    if contained is None:
        return
    writable = [os.path.realpath(path) for path in writable]
    drops = contained.own_user_namespace and os.geteuid() != 0
    if drops:
        _, permitted = _capabilities()
        _set_capabilities(permitted, permitted)
    here = os.getcwd()
    os.fchdir(contained.real_root)
    call_libc("unshare", _NEW_MOUNTS)  # the directory that this process stands in is now the new namespace's
    os.chroot(".")
    os.chdir("/")
    os.close(contained.real_root)
    contained = replace(contained, mounts=tuple(_mounts(contained.layers)))
    real_root = os.open("/", os.O_PATH | os.O_DIRECTORY) if more_later or for_forks else -1
    made = _enter_layers(contained, writable, here, ("memory",) if for_forks else ("disk", "memory"))
    if drops:
        _set_capabilities(0, permitted if more_later or for_forks else 0)
    below = contained.written
    written = {**below, **{path: (layer, *below.get(path, ())) for path, layer in made.items() if for_forks}}
    _contained = replace(contained, real_root=real_root, written=written)


def make_writable(paths: Sequence[str]) -> None:
    """Show real directories in this fork, once, after `renew(more_later=True)`. Raises `OSError`."""
    contained = _contained
    if contained is None:
        return
    drops = contained.own_user_namespace and os.geteuid() != 0
    if drops:
        _, permitted = _capabilities()
        _set_capabilities(permitted, permitted)
    for path in map(os.path.realpath, paths):
        os.makedirs(path, exist_ok=True)  # in the layer, where the real one was made since
        _show(f"/proc/self/fd/{contained.real_root}{path}", path)
    if drops:
        _set_capabilities(0, 0)
    os.close(contained.real_root)


def _enter_layers(contained: _Contained, writable: Sequence[str], here: str, kinds: Sequence[str]) -> dict[str, str]:
    """Mount overlays with new layers, and make them this process's root directory.

    The layers are on `disk` or in `memory`, the first of `kinds` that the kernel accepts. Directories in `writable`
    stay the real ones. Returns the layers in memory, by the directory that they lie above.
    """
    home = os.path.join(contained.layers, str(os.getpid()))
    remove_layers(Path(home))  # of an earlier process with this number
    os.makedirs(home, mode=0o700)
    for kind in kinds:
        if kind == "memory":
            size = int(_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            _mount("tmpfs", home, "tmpfs", 0, f"size={size},mode=700")
        try:
            tree = _Tree(home, contained)
            root = tree.build(here)
            break
        except OSError:
            if kind == kinds[-1]:
                raise
            call_libc(
                "umount2", os.fsencode(home if kind == "memory" else os.path.join(home, "root")), _DETACH, check=False
            )
    for path in (*writable, *_caches(here)):
        if os.path.isdir(path) and os.path.isdir(root + path):
            _show(path, root + path)
    for path in _listening_sockets():
        with contextlib.suppress(OSError):  # it is in a directory that this process may not enter
            _mount(path, root + path, None, _BIND)
    os.chroot(root)
    os.chdir(here)  # the old one is the real directory still
    return tree.layers if kind == "memory" else {}


class _Tree:
    """The directory tree of a contained process, while it is mounted."""

    def __init__(self, home: str, contained: _Contained) -> None:
        self._home = home
        self._mounts = {mount.path: mount for mount in contained.mounts}  # of several at one path, the last is seen
        self._root = os.path.join(home, "root")
        self._written = contained.written
        self.layers: dict[str, str] = {}
        self._refused: dict[str, OSError] = {}  # directories that are shown read-only, and why
        ids = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
        initial = not contained.own_user_namespace and ids == ["0", "0", str(2**32 - 1)]
        self._options = "redirect_dir=on" if initial else "userxattr"

    def build(self, here: str) -> str:
        """Mount the tree; return its root directory."""
        os.makedirs(self._root, exist_ok=True)
        self._add("/")
        for path, error in self._refused.items():
            if path == here or _is_below(here, path):
                raise error
        written = map(os.path.realpath, (here, os.path.expanduser("~"), "/tmp", "/var/tmp"))
        for path in sorted({_lowest_of_others(path) for path in written if os.path.isdir(path)}):
            untouched = any(_is_below(path, folder) or path == folder for folder in _UNTOUCHED)
            if os.geteuid() != 0 and not untouched and not os.path.ismount(self._root + path):
                self._overlay(path)
        return self._root

    def _add(self, path: str) -> None:
        """Show a directory in the tree, with all that is mounted below it."""
        below = [mounted for mounted in self._mounts if _is_below(mounted, path)]
        top = [mounted for mounted in below if not any(_is_below(mounted, other) for other in below)]
        mount = self._mounts.get(path)
        if path in _UNTOUCHED or (mount is not None and (mount.kind in _UNTOUCHED_KINDS or mount.read_only)):
            _bind(path, self._root + path)
            skipped = (*_UNTOUCHED_KINDS, "tmpfs") if path == "/run" else () if path not in _UNTOUCHED else None
            top = [] if skipped is None else [mounted for mounted in top if self._mounts[mounted].kind not in skipped]
        else:
            try:
                self._overlay(path)
            except OSError as error:
                if not below:
                    self._refused[path] = error
                self._add_without_overlay(path, has_mounts=bool(below))
                return
        for mounted in top:
            if os.path.isdir(mounted):
                self._add(mounted)
            elif os.path.exists(mounted):  # a file, such as a container's /etc/hosts
                read_only = os.path.isfile(mounted) and self._mounts[mounted].kind not in _UNTOUCHED_KINDS
                _bind(mounted, self._root + mounted, read_only=read_only)

    def _add_without_overlay(self, path: str, *, has_mounts: bool) -> None:
        """Show a directory's entries one by one, in a directory in memory; or all of it, read-only."""
        target, there = self._root + path, os.stat(path)
        try:
            entries = list(os.scandir(path)) if has_mounts else []
        except PermissionError:
            entries = []
        if not entries:
            _bind(path, target, read_only=True)
            return
        _mount("tmpfs", target, "tmpfs", 0, f"mode={stat.S_IMODE(there.st_mode):o}")
        for entry in entries:
            try:
                self._add_entry(entry, os.path.join(target, entry.name))
            except FileNotFoundError:
                if os.path.lexists(entry.path):  # else another process has removed it meanwhile, as often in /tmp
                    raise

    def _add_entry(self, entry: os.DirEntry[str], shown: str) -> None:
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), shown)
        elif entry.is_dir():
            os.mkdir(shown)
            self._add(entry.path)
        else:
            os.close(os.open(shown, os.O_CREAT | os.O_WRONLY, 0o600))
            _bind(entry.path, shown, read_only=entry.is_file())

    def _overlay(self, path: str) -> None:
        """Mount an overlay of a real directory, with a new layer above it."""
        upper, work = (os.path.join(self._home, f"{name}-{len(self.layers)}") for name in ("upper", "work"))
        self.layers[path] = upper
        os.mkdir(upper)
        os.mkdir(work)
        there = os.stat(path)
        with contextlib.suppress(OSError):
            os.chown(upper, there.st_uid, there.st_gid)
        os.chmod(upper, stat.S_IMODE(there.st_mode))
        with contextlib.ExitStack() as opened:  # descriptors: a path may hold what separates options
            names = []
            # Such as data that importing the workload has prepared.
            below = [layer for layer in self._written.get(path, ()) if os.listdir(layer)]
            for folder in (upper, work, *below, path):
                descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
                opened.callback(os.close, descriptor)
                names.append(f"/proc/self/fd/{descriptor}")
            options = f"upperdir={names[0]},workdir={names[1]},lowerdir={':'.join(names[2:])},volatile"
            _mount("overlay", self._root + path, "overlay", 0, f"{options},{self._options}")
        if os.statvfs(self._root + path).f_flag & os.ST_RDONLY:
            raise OSError(30, "its layer is read-only", path)


def _lowest_of_others(path: str) -> str:
    """Return the lowest directory on the way that another user owns: the kernel cannot copy it into a layer."""
    while os.stat(path).st_uid == os.geteuid() and path != "/":
        path = os.path.dirname(path)
    return path


def _caches(here: str) -> Iterator[str]:
    """Yield directories of downloads, and of CUDA's service: a trial that could not keep them would load them again."""
    named = [os.environ.get(name, "") for name in _CACHE_VARIABLES]
    folders = (*filter(None, named), *map(os.path.expanduser, _CACHES))
    for folder in (*folders, os.environ.get(_MPS_VARIABLE, _MPS_FOLDER)):
        path = os.path.realpath(folder)
        if not _is_below(here, path) and here != path:
            yield path


def _listening_sockets() -> Iterator[str]:
    """Yield sockets in overlaid directories that processes listen on: seen through an overlay, they refuse."""
    with open("/proc/net/unix", "rb") as lines:
        for line in lines:
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and fields[3] == b"00010000" and fields[7].startswith(b"/"):
                path = os.path.realpath(os.fsdecode(fields[7].rstrip(b"\n")))
                if not any(_is_below(path, folder) for folder in _UNTOUCHED):
                    yield path


def _is_below(path: str, folder: str) -> bool:
    return path != folder and path.startswith(os.path.join(folder, ""))


def _mounts(layers: str) -> Iterator[_Mount]:
    """Yield the mounts in their order, without those made for contained processes."""
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            fields, _, kinds = line.partition(b" - ")
            escaped, options = fields.split()[4:6]
            path = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), escaped))
            if not _is_below(path, layers):
                yield _Mount(path=path, kind=kinds.split()[0].decode(), read_only=b"ro" in options.split(b","))


def _enter_user_namespace() -> None:
    """Enter a user namespace and a mount namespace in which the ids of this process stand for themselves."""
    uid, gid = os.geteuid(), os.getegid()
    reading, writing = os.pipe()
    parent, helper = os.getpid(), 0
    if uid == 0:  # it may give all ids, from outside of the new namespace: files of others stay readable
        helper = os.fork()
        if helper == 0:
            os.close(writing)
            os.read(reading, 1)
            status = 1
            with contextlib.suppress(OSError):
                for name in ("uid_map", "gid_map"):
                    ranges = [line.split() for line in Path(f"/proc/self/{name}").read_text("utf-8").splitlines()]
                    text = "".join(f"{first} {first} {count}\n" for first, _, count in ranges)
                    Path(f"/proc/{parent}/{name}").write_text(text, "utf-8")
                status = 0
            os._exit(status)
    call_libc("unshare", _NEW_USER | _NEW_MOUNTS)
    os.close(writing)
    os.close(reading)
    if helper and os.waitpid(helper, 0)[1] == 0:
        return
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="utf-8")


def call_libc(name: str, *arguments: object, check: bool = True) -> None:
    """Call a function of the C library. Raises `OSError` with its name."""
    function: Callable[..., int] = getattr(_LIBC, name)
    if function(*arguments) != 0 and check:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    names = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else os.fsencode(options)
    try:
        call_libc("mount", *names, ctypes.c_ulong(flags), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"mount {kind or ''} on {target}") from error


def _show(path: str, target: str) -> None:
    """Show a real directory at another place."""
    try:
        _mount(path, target, None, _BIND)
    except OSError:  # something is mounted below it
        _bind(path, target)


def _bind(path: str, target: str, *, read_only: bool = False) -> None:
    """Show a real file or directory at another place, with the mounts below it."""
    _mount(path, target, None, _BIND | _REC)
    if read_only:
        attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
        name, size = os.fsencode(target), ctypes.sizeof(attributes)
        call_libc("syscall", _MOUNT_SETATTR, -100, name, _AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(size))


def _capabilities() -> tuple[int, int]:
    """Return this process's effective and permitted capabilities, as sets of bits."""
    header, data = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    call_libc("capget", ctypes.byref(header), ctypes.byref(data))
    return data[0] | data[3] << 32, data[1] | data[4] << 32


def _set_capabilities(effective: int, permitted: int) -> None:
    header, low = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), 2**32 - 1
    data = (ctypes.c_uint32 * 6)(effective & low, permitted & low, 0, effective >> 32, permitted >> 32, 0)
    call_libc("capset", ctypes.byref(header), ctypes.byref(data))


# ------------------------------------------------------------------------------------------ seen from outside


COUNT_SECONDS = 5.0  # how often layers are counted even where the disk does not fill


class LayerLimit:
    """Notices that the layers of a process have taken too much of the disk, without reading them each time."""

    def __init__(self, layers: Path | None, pid: int | None = None) -> None:
        self._folder = layers if layers is None or pid is None else layers / str(pid)
        self._free_before, self._counted_at = self._free(), time.monotonic()
        self._allowed = min(LARGEST_LAYER_BYTES, self._free_before // 2)

    def _free(self) -> int:
        if self._folder is None:
            return 0
        try:
            found = os.statvfs(self._folder.parent)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def excess(self) -> str:
        """Say how much was written where that is too much; empty where it is not."""
        is_due = time.monotonic() - self._counted_at > COUNT_SECONDS  # others may free what this process takes
        if self._folder is None or (not is_due and self._free_before - self._free() <= self._allowed):
            return ""
        self._counted_at = time.monotonic()
        size = 0
        for root, _, files in os.walk(self._folder):
            for name in files:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(root, name)).st_blocks * 512
        self._free_before = self._free() + size
        if size <= self._allowed:
            return ""
        return f"wrote {size / 2**30:.1f} GiB to files, more than the {self._allowed / 2**30:.1f} GiB that a trial may"


def remove_all_layers(layers: Path) -> None:
    """Remove what contained processes have written, and nothing else that the directory holds."""
    with contextlib.suppress(OSError):
        for folder in layers.iterdir():
            if folder.name.isdigit() and not folder.is_symlink():
                remove_layers(folder)
        layers.rmdir()


def remove_layers(folder: Path) -> None:
    """Remove what one process has written. The kernel leaves directories that nobody may read."""
    for root, directories, _ in os.walk(folder):
        for name in directories:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
