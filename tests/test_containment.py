"""What contained processes write, in real namespaces: as root, as an ordinary user, and where the kernel refuses."""

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.runtime import containment
from autotune.runtime.containment import LayerLimit, contain, make_writable, remove_all_layers, remove_layers, renew
from autotune.runtime.supervisor import fork

USER = 12345
SYS_ADMIN = 1 << 21


def in_fork(act: Callable[[], Any]) -> Any:
    """Run a function in a fork of this process; return its result. An exception's text is a failure."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            answer = {"result": act()}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        answer = json.loads(stream.read() or b'{"error": "it died"}')
    os.waitpid(pid, 0)
    assert "error" not in answer, answer
    return answer["result"]


def become_ordinary() -> None:
    """Give up root's rights."""
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # its own /proc, as after an exec


def drop_sys_admin() -> None:
    """Stay root, without the right to mount, as in a container."""
    effective, permitted = containment._capabilities()
    containment._set_capabilities(effective & ~SYS_ADMIN, permitted & ~SYS_ADMIN)


USERS = {"root": lambda: None, "container": drop_sys_admin, "ordinary": become_ordinary}


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Becomes a user of this kind. Where tests are not run as root, there is one kind."""
    if os.geteuid() != 0 and request.param != "ordinary":
        pytest.skip("needs root")
    return USERS[request.param] if os.geteuid() == 0 else lambda: None


@pytest.fixture
def home() -> Iterator[Path]:
    """A user's directory that every user can reach, with files to lose; and one for layers."""
    folder = Path(tempfile.mkdtemp(prefix="home, of:users "))
    folder.chmod(0o755)
    work = folder / "work"
    (work / "folder").mkdir(parents=True)
    for name in ("kept.txt", "second.txt", "folder/inner.txt"):
        (work / name).write_text("old")
    (work / "big.bin").write_bytes(bytes(1 << 20))
    with contextlib.closing(sqlite3.connect(work / "study.db")) as study:
        study.executescript("create table trials (state text); insert into trials values ('COMPLETE')")
    (folder / "logs").mkdir()
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER)
    yield folder
    remove_layers(folder)


def snapshot(folder: Path) -> dict[str, Any]:
    """Return what a directory holds: content, mode, owner and time of each entry."""
    found = {}
    for path in sorted(folder.rglob("*")):
        there = path.lstat()
        content = path.read_bytes().hex()[:200] if path.is_file() else ""
        found[str(path.relative_to(folder))] = (there.st_mode, there.st_uid, there.st_size, there.st_mtime_ns, content)
    return found


def by_ctypes() -> None:
    """Write behind Python's back, as C libraries do."""
    libc = ctypes.CDLL(None)
    descriptor = libc.open(b"kept.txt", os.O_WRONLY | os.O_TRUNC)
    assert libc.write(descriptor, b"new", 3) == 3
    libc.close(descriptor)


def by_mapping() -> None:
    """Write to memory that is a file."""
    with open("big.bin", "r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        mapped[:3] = b"new"
        mapped.flush()


def by_database() -> None:
    """Write to a database with a log beside it."""
    with contextlib.closing(sqlite3.connect("study.db")) as study:
        study.execute("pragma journal_mode = wal")
        study.execute("insert into trials values ('RUNNING')")
        study.commit()
        assert len(study.execute("select * from trials").fetchall()) == 2


def by_descriptor() -> None:
    """Write relative to a directory that is opened anew."""
    folder = os.open(".", os.O_RDONLY)
    os.remove("kept.txt", dir_fd=folder)
    os.close(os.open("kept.txt", os.O_WRONLY | os.O_CREAT, dir_fd=folder))


def write(path: str, mode: str = "w") -> None:
    """Write a word to a file, and read it again."""
    with open(path, mode) as stream:
        stream.write("new")
    assert Path(path).read_text().endswith("new")


DOORS: dict[str, Callable[[], Any]] = {
    "open": lambda: write("kept.txt"),
    "append": lambda: write("kept.txt", "a"),
    "shell": lambda: (
        subprocess.run("echo new > kept.txt; rm second.txt; mv folder other", shell=True, check=True),
        subprocess.run("grep -q new kept.txt && ls other", shell=True, check=True),
    ),
    "system": lambda: os.system("echo new > kept.txt; echo new > added.txt"),
    "numpy": lambda: np.arange(3).tofile("kept.txt"),
    "ctypes": by_ctypes,
    "memory map": by_mapping,
    "sqlite": by_database,
    "descriptor": by_descriptor,
    "chmod": lambda: os.chmod("kept.txt", 0o600),
    "utime": lambda: os.utime("kept.txt", (0, 0)),
    "truncate": lambda: os.truncate("kept.txt", 0),
    "replace": lambda: os.replace("second.txt", "kept.txt"),
    "remove": lambda: os.remove("kept.txt"),
    "rmtree": lambda: shutil.rmtree("folder"),
    "symbolic link": lambda: (os.remove("kept.txt"), os.symlink("second.txt", "kept.txt"), write("kept.txt")),
    "hard link": lambda: (os.link("kept.txt", "linked.txt"), write("linked.txt")),
    "new directory": lambda: (os.makedirs("a/b"), write("a/b/c.txt")),
    "absolute": lambda: write(f"{os.getcwd()}/kept.txt"),
    "temporary": lambda: write(f"/tmp/{os.path.basename(os.path.dirname(os.getcwd()))}-new.txt"),
    "var": lambda: write(f"/var/tmp/{os.path.basename(os.path.dirname(os.getcwd()))}-new.txt"),
}


def in_template(home: Path, user: Callable[[], None], act: Callable[[], Any], work: str = "work") -> Any:
    """Run a function in a contained fork, as a template is."""

    def template() -> Any:
        user()
        os.chdir(home / work)
        assert contain(home / "logs" / "layers") == ""
        return act()

    return in_fork(template)


def contained(home: Path, user: Callable[[], None], act: Callable[[], Any]) -> Any:
    """Run a function in a fork of a contained one, as a trial is a fork of its template."""
    return in_template(home, user, lambda: in_fork(lambda: (renew(), act())[1]))


def test_a_fork_shows_a_directory_that_was_made_after_it(home, user):
    logs, renewed, made = home / "logs" / "0000", os.pipe(), os.pipe()

    def make_directory() -> None:
        os.read(renewed[0], 1)
        logs.mkdir()
        if os.geteuid() == 0:
            os.chown(logs, USER, USER)
        os.write(made[1], b"!")

    def trial() -> bool:
        renew(more_later=True)
        os.write(renewed[1], b"!")
        os.read(made[0], 1)
        make_writable([str(logs)])
        write(str(logs / "log.txt"))
        write("kept.txt")
        return os.geteuid() == 0 or not any(containment._capabilities())

    outside = threading.Thread(target=make_directory)
    outside.start()
    assert in_template(home, user, lambda: in_fork(trial))
    outside.join()
    assert (logs / "log.txt").read_text() == "new"
    assert (home / "work" / "kept.txt").read_text() == "old"
    shutil.rmtree(logs)
    for descriptor in (*renewed, *made):
        os.close(descriptor)


def test_no_door_reaches_the_users_files(home, user):
    before = snapshot(home / "work")

    def through_all_doors() -> list[str]:
        first = [name for name, act in DOORS.items() if in_fork(lambda act=act: bool(renewed(act)) or "")]
        assert first == []
        return sorted(os.listdir("."))

    def renewed(act: Callable[[], Any]) -> None:
        renew()
        assert Path("kept.txt").read_text() == "old"
        assert not Path("added.txt").exists()
        act()

    assert in_template(home, user, through_all_doors) == sorted(os.listdir(home / "work"))
    assert snapshot(home / "work") == before
    for folder in ("/tmp", "/var/tmp"):
        assert not Path(folder, f"{home.name}-new.txt").exists()
    (home / "logs" / "layers" / "others").mkdir()
    remove_all_layers(home / "logs" / "layers")
    assert os.listdir(home / "logs" / "layers") == ["others"]
    (home / "logs" / "layers" / "others").rmdir()
    remove_all_layers(home / "logs" / "layers")
    assert os.listdir(home / "logs") == []


def test_files_below_a_directory_of_somebody_elses_are_written(home, user):
    (home / "group").mkdir(mode=0o755)
    (home / "group" / "name").mkdir()
    (home / "work").rename(home / "group" / "name" / "work")
    if os.geteuid() == 0:
        os.chown(home / "group" / "name", USER, USER)

    def template() -> str:
        in_fork(lambda: (renew(), write("kept.txt"), write("folder/inner.txt"), None)[-1])
        return Path("kept.txt").read_text()

    assert in_template(home, user, template, "group/name/work") == "old"


def test_a_directory_that_is_let_through_is_written_for_real(home, user):
    def trial() -> None:
        renew([str(home / "link")])
        write(f"{home}/link/log.txt")

    (home / "link").symlink_to(home / "logs")
    in_template(home, user, lambda: in_fork(trial))
    assert (home / "logs" / "log.txt").read_text() == "new"


def test_a_fork_finds_what_its_template_has_written(home, user):
    def template() -> list[Any]:
        os.makedirs("prepared")
        write("prepared/data.bin")
        write("kept.txt")
        os.remove("second.txt")
        shutil.rmtree("folder")
        os.mkdir("folder")

        def trial() -> list[Any]:
            renew()
            write("prepared/data.bin", "a")
            return [sorted(os.listdir(".")), os.listdir("folder"), Path("kept.txt").read_text()]

        in_fork(trial)
        assert Path("prepared/data.bin").read_text() == "new"
        return in_fork(trial)

    before = snapshot(home / "work")
    found = in_template(home, user, template)
    assert found == [["big.bin", "folder", "kept.txt", "prepared", "study.db"], [], "new"]
    assert snapshot(home / "work") == before


def test_a_fork_finds_what_the_forks_above_it_have_written(home, user):
    def template() -> list[Any]:
        write("kept.txt")

        def start() -> list[Any]:
            renew([str(home / "logs" / "layers")], for_forks=True)
            os.mkdir("prepared")
            write("prepared/data.bin")
            os.remove("second.txt")
            os.chdir("prepared")

            def trial() -> list[Any]:
                renew()
                write("data.bin", "a")
                return [sorted(os.listdir("..")), Path("../kept.txt").read_text(), Path("data.bin").read_text()]

            return [in_fork(trial), in_fork(trial), Path("data.bin").read_text()]

        return in_fork(start)

    before = snapshot(home / "work")
    found = [["big.bin", "folder", "kept.txt", "prepared", "study.db"], "new", "newnew"]
    assert in_template(home, user, template) == [found, found, "new"]
    assert snapshot(home / "work") == before


def test_rights_devices_and_places_are_as_before(home, user):
    def facts() -> dict[str, Any]:
        Path("/dev/null").write_text("x")
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
            real = os.stat(shared.name).st_dev == os.stat("/dev/shm").st_dev
        os.chmod("second.txt", 0o400)
        may_write = os.access("second.txt", os.W_OK)
        effective, _ = containment._capabilities()
        return {"here": os.getcwd(), "real": real, "may": may_write, "rights": effective, "uid": os.getuid()}

    found = contained(home, user, facts)
    assert found["here"] == str(home / "work")
    assert found["real"]
    assert (found["rights"] == 0) == (found["uid"] != 0)
    assert found["may"] == (found["uid"] == 0)


def test_what_a_killed_run_has_left_is_in_nobodys_way(home, user):
    def trial() -> str:
        left = home / "logs" / "layers" / str(os.getpid()) / "upper-0"
        left.mkdir(parents=True)
        (left / "left.txt").write_text("left")
        assert contain(home / "logs" / "layers") == ""
        return Path("kept.txt").read_text()

    def template() -> str:
        user()
        os.chdir(home / "work")
        return in_fork(trial)

    assert in_fork(template) == "old"


def test_servers_are_reached_by_their_sockets(home, user):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(home / "work" / "server"))
        os.chmod(home / "work" / "server", 0o777)
        server.listen()

        def connect() -> str:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect("server")
            return "connected"

        assert contained(home, user, connect) == "connected"


def test_a_tree_with_something_mounted_in_the_users_directory(home):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    data = home / "work" / "folder"

    def as_user() -> list[str]:
        containment.call_libc("unshare", containment._NEW_MOUNTS)
        containment._mount(None, "/", None, containment._REC | containment._SLAVE)
        containment._mount("tmpfs", str(data), "tmpfs", 0, "mode=777")
        (data / "mounted.txt").write_text("old")
        os.chown(data / "mounted.txt", USER, USER)

        def trial() -> list[str]:
            write("added.txt")
            write("folder/mounted.txt")
            return sorted(os.listdir(".")), Path("kept.txt").read_text()

        names, kept = contained(home, become_ordinary, trial)
        assert kept == "old"
        assert (data / "mounted.txt").read_text() == "old"
        return names

    before = snapshot(home / "work")
    assert "added.txt" in in_fork(as_user)
    assert snapshot(home / "work") == before


def test_a_file_that_is_mounted_cannot_be_written(home):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    mine = home / "work" / "second.txt"

    def container() -> str:
        containment.call_libc("unshare", containment._NEW_MOUNTS)
        containment._mount(None, "/", None, containment._REC | containment._SLAVE)
        containment._mount(str(mine), str(home / "work" / "kept.txt"), None, containment._BIND)

        def trial() -> str:
            with contextlib.suppress(OSError):
                write("kept.txt")
            return mine.read_text()

        return contained(home, lambda: None, trial)

    assert in_fork(container) == "old"
    assert mine.read_text() == "old"


def test_containers_on_an_overlay_keep_layers_in_memory(home, user):
    usual, lost = os.scandir, [Path(tempfile.mkdtemp()) for _ in range(9)]

    def losing(path: Any) -> Any:
        """List a directory; of /tmp, another process removes an entry before that is read."""
        if path != str(home.parent):
            return usual(path)
        found = list(usual(path))
        if os.geteuid() == 0:
            lost.pop().rmdir()
        return found

    before = snapshot(home / "work")

    def container() -> list[str]:
        user()
        os.chdir(home / "work")
        assert contain(home / "logs" / "layers") == ""
        containment._contained, containment.os.scandir = None, losing
        why = contain(home / "logs" / "inner")
        containment.os.scandir = usual
        if why == "":
            write("kept.txt")
            containment._contained = None
            why = contain(home / "logs" / "innermost")
        return [why, stat.filemode(os.stat("kept.txt").st_mode)]

    why, _ = in_fork(container)
    assert "mount" in why or "unshare" in why
    assert snapshot(home / "work") == before
    for folder in lost:
        folder.rmdir()


def test_where_no_namespace_may_be_made_that_is_the_answer(home):
    if os.geteuid() != 0:
        pytest.skip("needs root, to set a limit")

    def limited() -> str:
        containment.call_libc("unshare", containment._NEW_USER | containment._NEW_MOUNTS)
        Path("/proc/self/uid_map").write_text("0 0 1")
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        drop_sys_admin()
        os.chdir(home / "work")
        why = contain(home / "logs" / "layers")
        renew()
        assert not containment.is_active()
        return why

    assert in_fork(limited) == "unshare: No space left on device"
    assert os.listdir(home / "logs") == []


def test_layers_that_grow_too_large_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(containment, "LARGEST_LAYER_BYTES", 1 << 20)
    (tmp_path / "7" / "upper-0").mkdir(parents=True)
    limit = LayerLimit(tmp_path, 7)
    monkeypatch.setattr(limit, "_free", lambda: 1 << 40)
    (tmp_path / "7" / "upper-0" / "a.bin").write_bytes(b"x" * (1 << 19))
    monkeypatch.setattr(containment, "COUNT_SECONDS", -1.0)
    assert limit.excess() == ""
    (tmp_path / "7" / "upper-0" / "b.bin").write_bytes(b"x" * (1 << 20))
    monkeypatch.setattr(containment, "COUNT_SECONDS", 1000.0)
    assert limit.excess() == ""
    monkeypatch.setattr(containment, "COUNT_SECONDS", -1.0)
    assert "to files, more than the 0.0 GiB that a trial may" in limit.excess()
    assert LayerLimit(None).excess() == ""
