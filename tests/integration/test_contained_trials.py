"""Trials of real scripts and workloads in namespaces: what they write, what they read, and where the kernel refuses."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_trials import QUICK, REPOSITORY, configuration

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.data.record import Outcome
from autotune.runtime import containment
from autotune.runtime.executor import TrialFailed, WarmUp
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import Data

TRAIN = """
import keras
import numpy as np

x = np.zeros((64, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""
DOORS = (
    """
import fcntl, os, sqlite3, stat, subprocess, sys

for name in os.listdir("/proc/self/fd"):
    number = int(name)
    try:
        writable = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
    except OSError:  # the listing's own
        continue
    assert number in (1, 2) or not (writable and is_file), os.readlink(f"/proc/self/fd/{name}")
os.mkdir("made_once")
with open("rows.csv", "w") as rows:
    rows.writelines("1\\n" * 6000)
os.system("echo new > shell.txt")
save = "import pathlib; pathlib.Path('child.txt').write_text('new')"
subprocess.run([sys.executable, "-c", save], check=True)
os.chmod("mode.txt", 0o600)
with sqlite3.connect("study.db") as study:
    study.execute("create table trials (state text)")
"""
    + TRAIN
    + """
import tensorflow as tf

assert sum(1 for _ in tf.data.TextLineDataset("rows.csv")) == 6000
tf.io.gfile.copy("train.py", "copied.txt", overwrite=True)
tf.io.write_file("new.txt", "new")
tf.io.gfile.rename("new.txt", "renamed.txt", overwrite=True)
model.save("model.keras")
best = keras.callbacks.ModelCheckpoint("best.keras")
model.fit(x, x[:, :1], callbacks=[best], verbose=0)
model = keras.models.load_model("best.keras")
model.fit(x, x[:, :1], batch_size=16, epochs=3, callbacks=[best], verbose=0)
"""
)
FOLDS = (
    TRAIN
    + """
def save_as(name, **options):
    return keras.callbacks.ModelCheckpoint(f"{fold}-{name}", save_weights_only=True, **options)


def train(fold):
    best = keras.callbacks.ModelCheckpoint(f"{fold}.keras", monitor="val_loss", save_best_only=True)
    others = [save_as("{epoch:02d}.weights.h5"), save_as("often.weights.h5", save_freq=9)]
    model.fit(
        x, x[:, :1], batch_size=4, epochs=5, validation_split=0.25, verbose=0,
        callbacks=[best, *others, keras.callbacks.CSVLogger(f"{fold}.csv")],
    )
    for name in ("05", "often"):
        model.load_weights(f"{fold}-{name}.weights.h5")
    print(keras.models.load_model(f"{fold}.keras").predict(x), open(f"{fold}.csv").read().split("val_loss")[1])


for fold in range(3):
    train(fold)
"""
)
OLD = ("rows.csv", "shell.txt", "child.txt", "mode.txt", "copied.txt", "renamed.txt", "model.keras", "best.keras")
WRITES_MUCH = "open('much.bin', 'wb').write(bytes(1 << 26))\n"
WORKLOAD = """
import keras
import numpy as np
import tensorflow as tf
import autotune

np.save("prepared.npy", np.ones((64, 4), "float32"))


def model():
    with open("kept.txt", "w") as stream:
        stream.write("new")
    {more}
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def dataset():
    x = np.load("prepared.npy")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1]))


workload = autotune.Workload(
    model=model, dataset=dataset, compile=lambda: dict(optimizer="sgd", loss="mse"), batch_size=16
)
"""


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, time and content of each file below a directory."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in files
    }


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory, in which the tuner runs."""
    made = tmp_path / "work"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def opened(work: Path, tmp_path: Path) -> Any:
    """Opens trials of a source text; as a script unless it is a workload's."""
    if why := containment.why_unavailable(tmp_path / "layers"):
        pytest.skip(why)
    (tmp_path / "logs").mkdir()
    made: list[LocalExecutor] = []

    def start(source: str, *, script: bool = True) -> LocalExecutor:
        (work / "train.py").write_text(source)
        settings = ScriptSettings(scratch=str(tmp_path / "scratch")) if script else None
        reference = WorkloadReference(file=str(work / "train.py"), search_path=(str(work),), script=settings)
        made.append(LocalExecutor(reference, logs=tmp_path / "logs"))
        return made[-1]

    yield start
    for processes in made:
        processes.close()
    assert not (tmp_path / "logs" / "layers").exists()


def warm_up(processes: LocalExecutor, log: Path, data: Data | None = None) -> WarmUp:
    """Start a trial, and return what it reports once it trains."""
    log.parent.mkdir(exist_ok=True)
    trial = processes.launch(configuration(16), log=str(log), data=data, timing=QUICK)
    try:
        return trial.warm_up(120)
    finally:
        trial.kill()


@pytest.mark.fast
def test_a_script_writes_through_every_door_and_its_files_stay(opened, work, tmp_path):
    for name in OLD:
        (work / name).write_text("old")
    processes = opened(DOORS)
    before = snapshot(work)
    facts = processes.open()
    assert facts.uncontained == ""
    assert facts.script.left_out == ("ModelCheckpoint (train.py, line 36)",)
    for number in range(2):
        assert warm_up(processes, tmp_path / str(number) / "log.txt").started.examples == 64
    assert snapshot(work) == before


def test_a_fold_loads_what_its_fit_has_saved_in_a_trial_too(opened, work, tmp_path):
    (work / "0.keras").write_text("old")
    processes = opened(FOLDS)
    before = snapshot(work)
    told: list[str] = []
    processes.tell = told.append
    assert processes.open().script.fit_calls > 1
    assert told[:3] == [f"{when} of fit() in train.py, line 16" for when in ("call 1", "what follows call 1", "call 2")]
    assert warm_up(processes, tmp_path / "0" / "log.txt").started.examples == 48
    assert snapshot(work) == before


SAVING = """
class Slow(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        assert not self.monitor_op or logs[self.monitor] is not None
        super().on_epoch_end(epoch, logs)
        print("saved", epoch, *sorted(os.listdir(".")), flush=True)

"""


@pytest.mark.parametrize(
    ("writers", "is_timed"),
    [
        ("Slow('{epoch}-{val_loss:.2f}.keras', save_best_only=True), keras.callbacks.CSVLogger('log.csv')", True),
        ("Slow('a.keras', save_freq=3)", False),
        ("Slow('a.keras'), keras.callbacks.TensorBoard('logs')", False),
        ("Slow('{loss:d}.keras')", False),
    ],
)
def test_the_writers_that_trials_omit_are_timed_once(opened, work, tmp_path, writers, is_timed):
    (work / "1-0.00.keras").write_text("old")
    processes = opened(f"import os\n{TRAIN}{SAVING}model.fit(x, x[:, :1], verbose=0, callbacks=[{writers}])\n")
    before = snapshot(work)
    processes.open()
    first = warm_up(processes, tmp_path / "0" / "log.txt")
    assert (first.ready.writing_seconds is not None) is is_timed
    saved = "saved 0 1-0.00.keras train.py" in (tmp_path / "0" / "log.txt").read_text()
    assert saved is is_timed
    later = warm_up(processes, tmp_path / "1" / "log.txt", Data.from_started(first.started))
    assert later.ready.writing_seconds is None
    assert snapshot(work) == before


def test_a_training_in_another_program_is_named(opened, work, tmp_path):
    (work / "other.py").write_text(TRAIN + "model.fit(x, x[:, :1])\n", encoding="utf-8")
    script = opened("import subprocess, sys\nsubprocess.run([sys.executable, 'other.py'])\n")
    with pytest.raises(WorkloadError, match=r"other\.py, line \d+: trains in a process that the script starts"):
        script.open()


def test_a_trial_that_fills_the_disk_is_ended(opened, work, tmp_path, monkeypatch):
    monkeypatch.setattr(containment, "LARGEST_LAYER_BYTES", 1 << 24)
    processes = opened(WORKLOAD.format(more=WRITES_MUCH + "    import time; time.sleep(3600)"), script=False)
    processes.open()
    with pytest.raises(TrialFailed, match=r"wrote 0\.\d GiB to files, more than the 0\.0 GiB") as caught:
        warm_up(processes, tmp_path / "0" / "log.txt")
    assert caught.value.outcome is Outcome.ERROR
    assert "--allow-writes" in caught.value.hint
    script = opened(WRITES_MUCH + "import time; time.sleep(3600)")
    with pytest.raises(WorkloadError, match=r"wrote 0\.\d GiB to files"):
        script.open()


REFUSES = """
import ctypes, os, sys
from pathlib import Path
uid, libc = os.getuid(), ctypes.CDLL(None)
assert libc.unshare(0x10000000) == 0
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
assert libc.prctl(24, 21, 0, 0, 0) == 0  # no CAP_SYS_ADMIN after the exec
os.execv(sys.executable, [sys.executable, "-m", "autotune", "tune", *sys.argv[1:]])
"""


def tune_refused(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `autotune tune` where the kernel allows no namespace."""
    command = [sys.executable, "-c", REFUSES, "train.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)


def test_a_kernel_without_containment_is_told_by_the_run(work, tmp_path):
    source = "open('kept.txt', 'w').write('new')\nopen('made.txt', 'w').write('new')\n" + TRAIN
    (work / "kept.txt").write_text("old")
    (work / "train.py").write_text(source + "model.fit(x, x[:, :1], epochs=100, verbose=0)\n")
    before = snapshot(work)
    ended = tune_refused(work, "--budget", "30s", "--out", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    said = " ".join(ended.stdout.split())
    assert "trials cannot be isolated here (unshare: No space left on device): C code" in said
    after = snapshot(work)
    assert after.pop("made.txt")  # a new file is where the script creates it
    assert after == before
