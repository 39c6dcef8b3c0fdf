"""Scripts as they are, without TensorFlow: which file is one, where its calls are, what is changed, and the edit."""

import builtins
import contextlib
import functools
import io
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.data.errors import ApplyError, ConfigurationError
from autotune.data.facts import KerasVersion, ScriptFacts, ScriptSettings, Site, Trains, WorkloadReference
from autotune.data.run_directory import SCRATCH
from autotune.runtime import containment
from autotune.runtime.sources import (
    binds_workload,
    fingerprint_of_script,
    installed_packages,
    keras_of_sources,
    own_files,
)
from autotune.runtime.supervisor import fork, run_in_fork, send_answer
from autotune.script import children, sandbox
from autotune.script import settings as script_settings
from autotune.script.call_sites import (
    calls_in,
    count_method_calls,
    enclosing_ranges,
    is_called_in_loop,
    shown,
    site_of,
    users_frame,
)
from autotune.script.execute import make_endless, run_as_main
from autotune.script.interpose import around
from autotune.script.loading import parse_reference
from autotune.script.sandbox import SideEffects
from autotune.script.settings import Settings


def written(folder: Path, name: str, source: str) -> Path:
    """A source file."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    return file


# ------------------------------------------------------------------------------------------ which file is one


@pytest.mark.parametrize(
    ("source", "is_workload"),
    [
        ("workload = make()\n", True),
        ("workload: object = make()\n", True),
        ("from jobs import workload\n", True),
        ("if True:\n    workload = 1\n", True),
        ("try:\n    import a\nexcept ImportError:\n    workload = 1\n", True),
        ("def f():\n    workload = 1\n", False),
        ("class A:\n    workload = 1\n", False),
        ("model.fit(workload)\n", False),
        ("other = 1\n", False),
    ],
)
def test_file_is_workload_if_it_binds_the_name_at_top_level(tmp_path, source, is_workload):
    file = written(tmp_path, "train.py", "raise SystemExit('imported')\n" + textwrap.dedent(source))
    assert binds_workload(file, "workload") is is_workload


def test_a_script_is_told_from_a_workload_by_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "train.py", "raise SystemExit('imported')\n")
    written(tmp_path, "job.py", "workload = 1\n")
    written(tmp_path, "jobs/train.py", "x = 1\n")
    assert parse_reference("train.py").script is not None
    assert str(parse_reference("train.py")) == "train.py"
    assert parse_reference("train.py:other").script is None
    assert parse_reference("job.py").script is None
    assert parse_reference("jobs.train").script is not None


@pytest.mark.parametrize(
    ("source", "loops"),
    [
        ("for epoch in range(9):\n    model.fit(x)\n", True),
        ("while loss > 1:\n    with scope:\n        model.fit(x)\n", True),
        ("losses = [model.fit(x) for x in folds]\n", True),
        ("def train():\n    model.fit(x)\nwhile True:\n    train()\n", True),
        ("class A:\n    def run(self):\n        self.model.fit(x)\nfor a in runs:\n    a.run()\n", True),
        ("def inner():\n    model.fit(x)\ndef outer():\n    inner()\nfor fold in folds:\n    outer()\n", True),
        ("model.fit(x, epochs=9)\nfor x in data:\n    model.predict(x)\n", False),
        ("def main():\n    model.fit(x)\nif __name__ == '__main__':\n    main()\n", False),
        ("for part in parts:\n    def train():\n        model.fit(x)\ntrain()\n", False),
        ("def again():\n    model.fit(x)\n    again()\nagain()\n", False),
    ],
)
def test_call_in_a_loop_is_found_through_intermediate_functions(tmp_path, source, loops):
    assert is_called_in_loop([written(tmp_path, "train.py", source)], "fit") is loops


SEES = """
import inspect, json, multiprocessing, os, sys


def child(queue):
    queue.put([__name__, __file__])


if __name__ == "__main__":
    os.chdir("/")
    assert open(os.path.join(os.path.dirname(__file__), "beside.txt")).read() == "x"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    spawned = queue.get(timeout=60)
    process.join()
    frame = inspect.getfile(inspect.currentframe())
    sources = [inspect.getsource(child), inspect.getsource(sys.modules["__main__"])]
    spec = __spec__ and __spec__.name
    print(json.dumps([sys.argv, __file__, sys.path[0], frame, spec, __package__, spawned, sources]))
"""


@pytest.mark.parametrize("called", ["link.py", "folder/train.py", "../work/link.py", "{cwd}/link.py", "-m real.train"])
def test_a_script_sees_itself_as_under_python(tmp_path, called):
    for name in ("work/train.py", "work/real/train.py"):
        written(tmp_path, name, SEES)
    for folder in ("work", "work/real"):
        written(tmp_path, f"{folder}/beside.txt", "x")
    work = tmp_path / "work"
    (work / "link.py").symlink_to("real/train.py")
    (work / "folder").symlink_to("real")
    words = called.format(cwd=work).split()
    run = (
        "import sys; from autotune.script.execute import run_as_main; from autotune.script.loading import *; "
        "run_as_main(parse_reference(sys.argv[1]).model_copy(update={'args': ('--size', '4')}))"
    )
    seen = [
        subprocess.run([sys.executable, *command], cwd=work, capture_output=True, text=True, check=True).stdout
        for command in ([*words, "--size", "4"], ["-c", run, words[-1]])
    ]
    assert seen[0] == seen[1]


def test_own_files_are_imports_from_the_script_directory(tmp_path, monkeypatch):
    file = written(tmp_path, "train.py", "import numpy\nimport nets.big\nfrom data import load\n")
    written(tmp_path, "data.py", "import train\nmodel.fit(x)\nscaler.fit(y)\n")
    written(tmp_path, "nets/__init__.py", "")
    written(tmp_path, "nets/big.py", "import pandas\nfrom .small import layer\n")
    written(tmp_path, "nets/small.py", "")
    monkeypatch.syspath_prepend(tmp_path)
    files = own_files(file, tmp_path)
    assert {each.name for each in files} == {"train.py", "data.py", "big.py", "small.py", "__init__.py"}
    assert len(files) == 5
    assert count_method_calls(files, "fit") == 2
    assert installed_packages(files) == ["numpy", "pandas"]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("scaler = StandardScaler()\nscaler.fit(x)\nmodel.fit(x)\n", 1),
        ("y = Encoder().fit(y).transform(y)\nself.scale = StandardScaler()\nself.scale.fit(x)\nmodel.fit(x)\n", 1),
        ("model = StandardScaler()\nmodel = Sequential()\nmodel.fit(x)\n", 1),
        ("model = StandardScaler()\nmodel.fit(x)\nmodel, history = build()\nmodel.fit(x)\n", 2),
        ("def train(scaler):\n    scaler.fit(x)\nscaler = StandardScaler()\nmodel.fit(x)\n", 2),
    ],
)
def test_objects_of_scikit_learn_are_not_trained_by_keras(tmp_path, source, count):
    imports = "from sklearn.preprocessing import StandardScaler, LabelEncoder as Encoder\n"
    assert count_method_calls([written(tmp_path, "train.py", imports + source)], "fit") == count


def test_the_fingerprint_follows_every_file_of_the_script(tmp_path):
    data = written(tmp_path, "data.py", "a = 1\n")
    file = written(tmp_path, "train.py", "import data\n")
    reference = WorkloadReference(file=str(file), search_path=(str(tmp_path),))
    before = fingerprint_of_script(reference)
    assert fingerprint_of_script(reference) == before
    data.write_text("a = 2\n", encoding="utf-8")
    assert fingerprint_of_script(reference) != before


def test_a_fork_answers_and_nothing_of_it_is_left():
    def run(pipe):
        child = subprocess.Popen(["sleep", "1000"], close_fds=False)
        send_answer(pipe, {"pid": child.pid})

    stat = Path(f"/proc/{run_in_fork(run)['pid']}/stat")
    for _ in range(1000):
        if not stat.exists() or stat.read_text().split()[2] == "Z":  # it was killed, and may be reaped by nobody yet
            break
        time.sleep(0.01)
    else:
        pytest.fail("the child lives")
    assert run_in_fork(lambda pipe: os._exit(1)) == {}

    def die(pipe):
        if fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)  # this child holds the pipe

    assert run_in_fork(die) == {"killed_by": signal.SIGKILL}
    doing = []

    def work(pipe):
        send_answer(pipe, {"doing": "the work"})
        send_answer(pipe, {"result": 1})

    assert run_in_fork(work, on_progress=doing.append) == {"result": 1}
    assert doing == ["the work"]


def test_a_range_becomes_endless_while_the_script_runs(tmp_path):
    source = """
    import itertools

    def epochs():
        for epoch in range(2):
            yield epoch

    now_endless()
    seen = list(itertools.islice(epochs(), 5)), [other for _ in range(1) for other in range(3)]
    """
    file = written(tmp_path, "train.py", source)
    reference = WorkloadReference(file=str(file), search_path=(str(tmp_path),), script=ScriptSettings())
    site = Site(file="train.py", function="epochs", call="range", order=0, line=5)

    def run(pipe):
        builtins.now_endless = lambda: make_endless(site, reference)
        run_as_main(reference, adjustable=True)
        send_answer(pipe, {"seen": sys.modules["__main__"].seen})

    assert run_in_fork(run) == {"seen": [[0, 1, 0, 1, 0], [0, 1, 2]]}


def test_a_range_of_the_scripts_own_is_left_alone(tmp_path):
    source = """
    range = lambda bound: "ab"
    seen = []
    for part in range(1):
        seen += part
    """
    file = written(tmp_path, "train.py", source)
    reference = WorkloadReference(file=str(file), search_path=(str(tmp_path),), script=ScriptSettings())

    def run(pipe):
        run_as_main(reference, adjustable=True)
        send_answer(pipe, {"seen": sys.modules["__main__"].seen})

    assert run_in_fork(run) == {"seen": ["a", "b"]}


def test_a_watched_environment_is_put_back(monkeypatch):
    for path in ("", "/a:/b"):
        monkeypatch.setenv("PYTHONPATH", path)
        children.watch_children(7)
        children.stop_watching()
        assert os.environ.get("PYTHONPATH", "") == path
        assert "AUTOTUNE_SURVEY" not in os.environ


def test_child_pythons_import_the_users_sitecustomize(tmp_path, monkeypatch):
    written(tmp_path, "sitecustomize.py", "print('the user')\n")
    for name in ("PYTHONPATH", "AUTOTUNE_SURVEY"):
        monkeypatch.setenv(name, str(tmp_path))
    children.watch_children(7)
    assert not children.is_child()
    code = "import sys; print(sys.modules['sitecustomize'].__file__, [p for p in sys.path if 'child_site' in p])"
    code += "\nfrom autotune.script import children; print(children.is_child())"
    environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"] + os.pathsep + os.getcwd()}
    seen = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.splitlines() == ["the user", f"{tmp_path}/sitecustomize.py []", "True"]
    children.stop_watching()
    assert os.environ.get("AUTOTUNE_SURVEY") is None
    assert os.environ["PYTHONPATH"] == str(tmp_path)


def test_a_wrapper_leaves_no_trace_once_it_is_undone():
    class Base:
        def own(self):
            return "own"

    class Derived(Base):
        pass

    for kind in (Base, Derived):
        before = dict(vars(kind))
        undo = around(kind, "own", lambda usual, *arguments: f"wrapped {usual(*arguments)}")
        assert kind().own() == "wrapped own"
        undo()
        assert dict(vars(kind)) == before


# ------------------------------------------------------------------------------------------ where its calls are


CALLS = """
    from probe import batch, here

    def pipeline(source):
        return source.batch(1).batch(
            2,
        ).prefetch(3)

    {shift}
    pipeline(here)
    here.batch(4)
    class Net:
        def build(self):
            return here.batch(5)
    Net().build()
    kept = [here.batch(size) for size in (6, 7)]
"""


class Source:
    """Notes from where its `batch` is called."""

    def __init__(self, folder):
        self.folder, self.sites = str(folder), []

    def batch(self, size):
        """Note the call."""
        self.sites.append((size, site_of(sys._getframe(1), self.folder)))
        return self

    def prefetch(self, size):
        """Note nothing."""
        return self


def sites_of(folder, shift=""):
    """The sites of the calls in `CALLS`, by the number that each is given."""
    source = Source(folder)
    file = written(folder, "train.py", textwrap.dedent(CALLS).format(shift=shift))
    scope = {"__name__": "__main__"}
    sys.modules["probe"] = type(sys)("probe")
    sys.modules["probe"].batch, sys.modules["probe"].here = None, source
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), scope)
    finally:
        del sys.modules["probe"]
    return dict(source.sites)


def test_a_call_is_known_by_its_function_and_order(tmp_path):
    sites = sites_of(tmp_path)
    assert {size: (each.function, each.order) for size, each in sites.items()} == {
        1: ("pipeline", 0),
        2: ("pipeline", 1),
        4: ("<module>", 0),
        5: ("Net.build", 0),
        6: ("<module>", 1),
        7: ("<module>", 1),
    }
    assert {site.call for site in sites.values()} == {"batch"}
    assert {site.file for site in sites.values()} == {"train.py"}


def test_a_call_in_a_linked_script_is_the_same_call(tmp_path):
    file = written(tmp_path, "real/train.py", "")
    (tmp_path / "link.py").symlink_to(file)
    assert shown(str(tmp_path / "link.py"), str(file.parent)) == shown(str(file), str(file.parent)) == "train.py"


def test_a_call_that_moved_to_another_line_is_the_same_call(tmp_path):
    before = sites_of(tmp_path)
    calls_in.cache_clear()
    after = sites_of(tmp_path, shift="pass\npass  # é\n")
    calls_in.cache_clear()
    assert {size: each.key for size, each in after.items()} == {size: each.key for size, each in before.items()}
    assert after[4].line == before[4].line + 2


def test_the_ranges_around_a_line_are_found_the_innermost_first(tmp_path):
    source = """
    for trial in range(2):
        for epoch in tqdm(enumerate(range(3)), desc="x"):
            for batch in batches:
                step(batch)
        for other in range(4):
            step(other)
    """
    file = written(tmp_path, "train.py", source)
    found = enclosing_ranges(str(file), 5, str(tmp_path))
    assert [(site.call, site.line) for site in found] == [("range", 3), ("range", 2)]
    assert enclosing_ranges(str(file), 1, str(tmp_path)) == []


@pytest.mark.parametrize(
    "packages",
    ["/lib/site-packages", "/usr/local/lib/python3.12/dist-packages", "/opt/modules/tf"],
    ids=os.path.basename,
)
def test_users_frame_skips_packages_and_python_wrappers(packages, monkeypatch):
    module = SimpleNamespace(__path__=["/opt/modules/tf/tensorflow"])
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    source = "def called(*_):\n    return users_frame()\n"
    library = {"users_frame": users_frame}
    exec(compile(source, f"{packages}/tensorflow/ops.py", "exec"), library)

    @contextlib.contextmanager
    def managed():
        yield library["called"]()

    managed.__wrapped__.__code__ = managed.__wrapped__.__code__.replace(co_filename=f"{packages}/keras/a.py")
    here = sys._getframe()
    assert library["called"]() is here
    assert functools.singledispatch(library["called"])(1) is here
    with managed() as frame:
        assert frame is here


# ------------------------------------------------------------------------------------------ what is changed


SITE = Site(file="train.py", function="<module>", call="batch", order=0, line=7)
FACTS = ScriptFacts(
    trains=Trains.FIT,
    baseline={"batch_size": 32, "prefetch": "as_written", "jit_compile": "auto"},
    sites={"batch_size": (SITE,), "prefetch": (SITE.model_copy(update={"call": "prefetch"}),)},
)


def test_only_what_differs_from_the_script_is_changed():
    same = Settings.from_configuration({"batch_size": 32, "prefetch": "as_written", "jit_compile": "auto"}, FACTS)
    assert same.changes == {}
    assert same.at("batch_size", SITE, 32) == 32
    other = Settings.from_configuration({"batch_size": 64, "prefetch": 2, "jit_compile": True}, FACTS)
    assert other.at("batch_size", SITE, 32) == 64
    elsewhere = SITE.model_copy(update={"order": 1})
    assert other.at("batch_size", elsewhere, 32) == 32
    assert other.at("batch_size", SITE, 16) == 16, "the same line makes the batches of something else"
    assert other.value("jit_compile", "auto") is True


def test_missing_call_site_fails_before_the_first_step():
    settings = Settings.from_configuration({"batch_size": 64, "prefetch": 2, "jit_compile": "auto"}, FACTS)
    settings.at("batch_size", SITE, 32)
    with pytest.raises(ApplyError, match=r"prefetch was set at prefetch\(\) in train.py, line 7"):
        settings.refuse_missing(FACTS)
    assert settings.refuse_missing(FACTS, skip=True) == ["prefetch"]


def test_one_of_several_call_sites_that_is_gone_is_missing():
    second = SITE.model_copy(update={"order": 1, "line": 9})
    facts = FACTS.model_copy(update={"sites": {"batch_size": (SITE, second)}})
    settings = Settings.from_configuration({"batch_size": 64}, facts)
    settings.at("batch_size", SITE, 32)
    with pytest.raises(ApplyError, match="line 9"):
        settings.refuse_missing(facts)
    settings.at("batch_size", second, 32)
    assert settings.refuse_missing(facts) == []


def test_a_call_site_of_a_knob_that_is_not_changed_may_be_gone():
    Settings.from_configuration(
        {"batch_size": 32, "prefetch": "as_written", "jit_compile": True}, FACTS
    ).refuse_missing(FACTS)


def test_tuned_gives_the_scripts_values_and_those_of_a_trial(monkeypatch):
    monkeypatch.setattr(script_settings, "_settings", None)
    assert script_settings.tuned(batch_size=32).batch_size == 32
    monkeypatch.setattr(script_settings, "_settings", Settings(changes={"batch_size": 128}))
    assert script_settings.tuned(batch_size=32, prefetch=1).batch_size == 128
    assert script_settings.tuned(batch_size=32).batch_size == 128
    assert script_settings.tuned(batch_size=16).batch_size == 16, "the script has tried again with less"
    with pytest.raises(ConfigurationError, match="batch_sise"):
        script_settings.tuned(batch_sise=32)


# ------------------------------------------------------------------------------------------ what trials write


def files_below(folder):
    """The files below a folder, by their names."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def in_watched_fork(run, folder, act):
    """What a function returns, or why it is refused, in a fork whose writes are watched: its audit hook stays."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        os.chdir(folder)
        settings = ScriptSettings(scratch=str(run / SCRATCH))

        def answer(text):
            os.write(writing, str(text).encode())
            os._exit(0)

        effects = SideEffects(WorkloadReference(file="/train.py", script=settings), lambda error: answer(error.message))
        effects.watch_writes()
        try:
            answer(act(effects))
        except BaseException as error:
            answer(repr(error))
    os.close(writing)
    with open(reading, encoding="utf-8") as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    return answer


@pytest.fixture
def work(tmp_path):
    """A user's directory, beside the one of a run."""
    for name in ("run", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "work"


def test_users_temporary_file_is_not_overwritten(work, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    mine = written(work, "mine.csv", "mine")

    def act(_):
        for name in ("mine.csv", "new.csv"):
            (work / name).write_text("a trial's")
        return mine.read_text()

    assert in_watched_fork(work.parent / "run", "/", act) == "a trial's"
    assert mine.read_text() == "mine"
    assert (work / "new.csv").read_text() == "a trial's"


def test_append_extends_a_copy_of_the_existing_file(work):
    log = written(work, "log.txt", "old")

    def act(effects):
        with log.open("a") as stream:
            stream.write(", new")
        return log.read_text() + str(effects.left_out)

    assert in_watched_fork(work.parent / "run", work, act) == "old, new['changes of files that exist']"
    assert log.read_text() == "old"


def recreates_its_output(_):
    """Write a database, and a directory and a link anew; return what is there."""
    with contextlib.closing(sqlite3.connect("new.db")) as database:
        database.execute("create table if not exists a (b)")
    if os.path.exists("out"):
        shutil.rmtree("out")
    os.mkdir("out")
    Path("out/a.txt").write_text("a")
    if os.path.lexists("latest"):
        os.remove("latest")
    os.symlink("out", "latest")
    return sorted(os.listdir("."))


def test_output_of_a_trial_is_not_a_user_file_in_the_next_trial(work):
    for _ in range(2):
        answer = in_watched_fork(work.parent / "run", work, recreates_its_output)
        assert answer == str(["latest", "new.db", "out"]), answer


def fails_by_itself():
    """Try what Python cannot do, and what opens a folder; return how each ended."""
    acts = [
        lambda: os.remove("nothing.txt"),
        lambda: Path("nothing.txt").unlink(missing_ok=True),
        lambda: open("nowhere/file.txt", "w").close(),
        lambda: os.rmdir("nothing"),
        lambda: tempfile.TemporaryFile(dir=".").close(),
        lambda: os.symlink("mine.txt", "nowhere/link"),
    ]
    ended = []
    for act in acts:
        try:
            act()
            ended.append("done")
        except OSError as error:
            ended.append(type(error).__name__)
    return ended


def test_what_python_cannot_do_fails_as_it_does_without_a_watch(work):
    usual = in_watched_fork(work.parent / "run", work, lambda _: os.chdir(work) or str(fails_by_itself()))
    missing = "FileNotFoundError"
    assert usual == str([missing, "done", missing, missing, "done", missing])
    assert os.listdir(work) == []


def changes_everything():
    """Create, change, rename and remove files, and read them back."""
    Path("mine.txt").write_text("new")
    with open("changed.txt", "r+") as stream:
        stream.write("N")
    os.truncate("cut.txt", 1)
    os.chmod("mode.txt", 0o600)
    os.remove("gone.txt")
    os.makedirs("made/inner")
    Path("made/inner/a.txt").write_text("a")
    os.rename("made/inner/a.txt", "made/b.txt")
    Path("new.tmp").write_text("replaced")
    os.replace("new.tmp", "old.txt")
    shutil.copy2("old.txt", "copied.txt")
    with contextlib.closing(sqlite3.connect("new.db")) as database:
        database.execute("create table a (b)")
    with contextlib.closing(sqlite3.connect("new.db")) as database:
        assert not database.execute("select * from a").fetchall()
    read = [Path(name).read_text() for name in ("mine.txt", "changed.txt", "cut.txt", "old.txt", "copied.txt")]
    there = [os.path.exists(name) for name in ("gone.txt", "new.tmp", "made/b.txt")]
    shown = (os.listdir("made"), os.stat("mode.txt").st_mode & 0o777)
    shutil.rmtree("made")
    return read, there, shown, os.path.exists("made")


def test_changes_of_files_are_redirected_and_new_files_are_not(work):
    """Changed files go to the trial's own folder."""
    names = ("mine.txt", "changed.txt", "cut.txt", "mode.txt", "gone.txt", "old.txt")
    before = [(written(work, name, "old").stat(), name) for name in names]
    answer = in_watched_fork(work.parent / "run", work, lambda _: changes_everything())
    expected = ["new", "Nld", "o", "replaced", "replaced"], [False, False, True], (["inner", "b.txt"], 0o600), False
    assert answer in (str(expected), str(expected).replace("'inner', 'b.txt'", "'b.txt', 'inner'"))
    assert sorted(os.listdir(work)) == sorted([*names, "copied.txt", "new.db"])
    for status, name in before:
        now = (work / name).stat()
        assert ((work / name).read_text(), now.st_mtime_ns, now.st_mode) == ("old", status.st_mtime_ns, status.st_mode)


@pytest.mark.parametrize(
    "change",
    [
        lambda: shutil.rmtree("out"),
        lambda: os.rename("out", "moved"),
        lambda: os.remove("mine.txt", dir_fd=os.open(".", os.O_RDONLY)),
        lambda: os.chmod(os.open("mine.txt", os.O_RDONLY), 0o600),
        lambda: io.FileIO("mine.txt", "w"),
        lambda: sqlite3.connect("mine.txt"),
        lambda: sqlite3.Connection("mine.txt"),
        lambda: os.system("echo new > mine.txt"),
        lambda: subprocess.run("echo new > mine.txt", shell=True),
        lambda: subprocess.run([sys.executable, "-c", "open('mine.txt', 'w')"]),
        lambda: os.posix_spawnp("cp", ["cp", "out/a.txt", "mine.txt"], {}),
    ],
)
def test_a_change_that_cannot_be_redirected_is_refused(work, change):
    for name in ("mine.txt", "out/a.txt"):
        written(work, name, "mine")
    answer = in_watched_fork(work.parent / "run", work, lambda _: change())
    assert "test_scripts.py, line " in answer
    assert any(words in answer for words in ("would change", "would overwrite", "starts `")), answer
    assert files_below(work) == ["mine.txt", "out/a.txt"]
    assert (work / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "reads"),
    [
        ("git rev-parse HEAD", True),
        ("/usr/bin/nvidia-smi -L", True),
        (["/bin/sh", "-c", "ls"], True),
        (b"uname -a", True),
        ("git checkout .", False),
        ("git", False),
        ("cat a.txt > b.txt", False),
        ("cat $(rm b.txt)", False),
        ("cat a.txt; rm b.txt", False),
        ("cat 'a", False),
        (["/bin/sh", "-c", "rm b.txt"], False),
        (["python", "-c", "pass"], False),
        ([], False),
    ],
)
def test_a_program_runs_where_it_is_known_to_only_read(command, reads):
    assert sandbox._only_reads(command) is reads


@pytest.mark.parametrize(
    ("database", "file"),
    [
        ("study.db", "study.db"),
        (b"study.db", "study.db"),
        ("file:study.db?cache=shared", "study.db"),
        ("file:///data/study.db", "/data/study.db"),
        ("file://localhost/data/study.db", "/data/study.db"),
        ("file:study.db?mode=ro", None),
        ("file:study.db?cache=private&immutable=1", None),
        ("file:memory?mode=memory", None),
        (":memory:", None),
        ("", None),
        (None, None),
    ],
)
def test_a_database_is_known_by_its_file(database, file):
    assert sandbox._database_path(database) == (file and os.path.abspath(file))


def test_trials_disable_trackers_whatever_the_shell_sets(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"WANDB_MODE": "online", "MLFLOW_TRACKING_URI": "http://server"})
    monkeypatch.setattr(containment, "is_active", lambda: True)
    settings = ScriptSettings(scratch=str(tmp_path / SCRATCH))
    SideEffects(WorkloadReference(file="/train.py", script=settings), print).install(None)
    assert os.environ["WANDB_MODE"] == "disabled"
    assert os.environ["NEPTUNE_MODE"] == "debug"
    assert os.environ["MLFLOW_TRACKING_URI"] == f"file:{tmp_path / SCRATCH}/mlflow"
    assert os.environ["MLFLOW_REGISTRY_URI"] == "http://server"


@pytest.mark.parametrize("contained", [False, True])
def test_writing_callbacks_are_dropped_unless_results_are_needed(monkeypatch, contained):
    """A contained `fit` that is not timed keeps its results."""
    names = ("EarlyStopping", "ModelCheckpoint", "TensorBoard", "RemoteMonitor")
    callbacks = [type(name, (), {})() for name in names]
    callbacks += [type("Mine", (type(callbacks[1]),), {})(), type("Logger", (), {"__module__": "wandb.keras"})()]
    monkeypatch.setattr(containment, "is_active", lambda: contained)
    effects = SideEffects(WorkloadReference(file="/train.py"), print)

    def kept(**options):
        return [type(callback).__name__ for callback in effects.without_writers(callbacks, **options)]

    assert kept(timed=True) == ["EarlyStopping"]
    assert kept() == (["EarlyStopping", "ModelCheckpoint", "Mine"] if contained else ["EarlyStopping"])
    assert effects.left_out == ["ModelCheckpoint", "TensorBoard", "RemoteMonitor", "Mine", "Logger"]
    assert [*effects.without_writers(None), *effects.without_writers(callbacks[0])] == [callbacks[0]]


# ------------------------------------------------------------------------------------------ which Keras it imports


@pytest.mark.parametrize(
    ("source", "legacy", "version"),
    [
        ("import keras\n", "", KerasVersion.KERAS_3),
        ("import tensorflow as tf\n", "", KerasVersion.KERAS_3),
        ("import tensorflow as tf\n", "1", KerasVersion.KERAS_2),
        ("from tensorflow.keras import layers\n", "True", KerasVersion.KERAS_2),
        ("import tensorflow as tf\n", "yes", KerasVersion.KERAS_3),
        ("import keras\n", "1", KerasVersion.KERAS_3),
        ("import tf_keras as keras\n", "", KerasVersion.KERAS_2),
        ("import keras\nimport network\n", "", KerasVersion.KERAS_2),
    ],
)
def test_the_keras_of_a_script_is_what_its_files_import(tmp_path, source, legacy, version):
    files = [written(tmp_path, "train.py", source), written(tmp_path, "network.py", "from tf_keras import layers\n")]
    found = own_files(files[0], tmp_path)
    assert keras_of_sources(found, {"TF_USE_LEGACY_KERAS": legacy}) is version
