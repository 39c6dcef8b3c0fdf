"""`autotune verify` as a user runs it, on a recipe written by hand: its answer, its exit code, and what it leaves."""

import re
import subprocess
from pathlib import Path

import pytest
from real_trials import configuration
from test_end_to_end import TINY, to_its_end, with_enough_time

from autotune.data.figures import Interval
from autotune.machine.fingerprint import fingerprint
from autotune.recipe.evidence import Confirmation, CreatedBy, Evidence, PeakMemory, RecipeWorkload, Stability
from autotune.recipe.recipe import Recipe
from autotune.stats.deciding import EndedBy, Verdict

SOURCE = TINY.replace("batch_size=16", 'batch_size=16, baseline={"jit_compile": False}')
RATE = Interval(value=1.0, low=1.0, high=1.0)
MEMORY = PeakMemory(host=None, device=None)
RECIPE = Recipe(
    configuration=dict(configuration(128, jit_compile=False)),
    baseline=dict(configuration(16, jit_compile=False)),
    evidence=Evidence(
        verdict=Verdict.FASTER,
        ended_by=EndedBy.SETTLED,
        min_gain=0.02,
        candidates=8,
        excluded_gain=None,
        speedup=Interval(value=1.5, low=1.4, high=1.6),
        throughput=RATE,
        baseline_throughput=RATE,
        compile_seconds=None,
        baseline_compile_seconds=None,
        peak_memory_bytes=MEMORY,
        baseline_peak_memory_bytes=MEMORY,
        input_wait_fraction=None,
        stability=Stability(checks=(), not_checked=()),
        confirmation=Confirmation(processes=4, pairs=20, leaders=1, confidence=0.975, pairing="alternating", trials=()),
    ),
    learning_rate_rule=None,
    machine=fingerprint(),
    workload=RecipeWorkload(name="train", fingerprint="sha256:00"),
    created_by=CreatedBy(
        autotune="0.1.0",
        run="by hand",
        created_at="2026-11-20T19:10:01.250+00:00",
        search_space="quick.toml",
        trials=0,
        seed=0,
        budget_seconds=60.0,
        spent_seconds=60.0,
    ),
)


@pytest.fixture
def verify(tmp_path, environment):
    """Runs `autotune verify`, and sees that no process is left; `tmp_path / "tmp"` has its files."""
    (tmp_path / "tmp").mkdir()
    RECIPE.save(tmp_path / "recipe.json")

    def verified(source: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(source)
        its_own = {**environment, "TMPDIR": str(tmp_path / "tmp")}
        command = ("-m", "autotune", "verify", "recipe.json", "train.py", "--budget")
        return with_enough_time(
            lambda budget: to_its_end((*command, f"{budget}s"), its_own, tmp_path),
            75,
            enough=lambda ended: "there was time for fewer than two fresh processes" not in ended.stdout,
        )

    return verified


def found(ended: subprocess.CompletedProcess[str]) -> str:
    """The finding that was printed."""
    assert ended.stderr == ""
    return ended.stdout.splitlines()[-1].partition(":")[0]


def left(tmp_path: Path) -> list[str]:
    """What there is in the directory for temporary files."""
    return [each.name for each in (tmp_path / "tmp").iterdir()]


def test_a_claim_is_measured_again(verify, tmp_path):
    ended = verify(SOURCE)
    finding = found(ended)
    assert finding in {"holds", "weaker", "gone", "undecided"}
    assert ended.returncode == (0 if finding == "holds" else 1)
    assert "claimed   ×1.50 (1.40 to 1.60)" in ended.stdout.splitlines()
    measured = r"^measured  ×\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\) from \d+ fresh processes a side$"
    assert re.search(measured, ended.stdout, re.MULTILINE), ended.stdout
    assert left(tmp_path) == []


def test_the_log_of_what_crashes_can_be_read(verify, tmp_path):
    crash = "def dataset(config):\n    assert config.batch_size == 16 or __import__('os')._exit(9)\n"
    ended = verify(SOURCE.replace("def dataset():\n", crash))
    assert found(ended) == "unstable", ended.stdout
    assert ended.returncode == 1
    assert "it failed (crashed): ended with exit status 9" in ended.stdout
    named = Path(re.search(r"\(see (.+)\)\.$", ended.stdout)[1])
    assert (named / "log.txt").is_file()
    assert len(left(tmp_path)) == 1
