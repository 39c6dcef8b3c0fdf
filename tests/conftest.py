"""Order of the suite, and the surroundings that all tests share."""

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

RUNTIME = tempfile.mkdtemp()  # a fork that a test ends must not remove it
os.environ["XDG_RUNTIME_DIR"] = RUNTIME  # tests lock devices here, apart from the user's own runs
REAL = [Path(__file__).parent / name for name in ("integration", "faults")]

hypothesis.settings.register_profile(
    "without a clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("without a clock")  # a machine that is busy breaks no property


NOT_RUN = 3
"""Exit status where tests were not run: a worker died, or a file could not be collected."""
lost: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Note a worker that died."""
    if error:
        lost.append(f"{node} died: {error}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be collected."""
    if report.failed:
        lost.append(f"{report.nodeid} was not collected")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell tests that were not run from tests that failed; remove what tests locked devices in."""
    shutil.rmtree(RUNTIME, ignore_errors=True)
    if lost and not hasattr(session.config, "workerinput"):
        session.exitstatus = NOT_RUN


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The directory of a run that found something faster: to be read, or copied."""
    from simulated_runs import faster_by, on_disk, simulated_trials, tune_simulated

    with on_disk(tmp_path_factory.mktemp("runs") / "one") as directory:
        tune_simulated(simulated_trials(faster_by(batch_size=2.0), noise=0.02), directory, budget=120.0)
    return directory.path


@pytest.fixture(scope="session")
def recipes(tmp_path_factory):
    """One recipe of each verdict, and one with a watch at its end, out of simulated runs."""
    from test_recommendation import run_that_is

    from autotune.stats.deciding import Verdict

    made = {verdict: run_that_is(verdict, tmp_path_factory.mktemp("run"))[0] for verdict in Verdict}
    return {**made, "watched": run_that_is(Verdict.FASTER, tmp_path_factory.mktemp("run"), soak=10.0)[0]}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run real trials last, as a mistake shows before the first `import tensorflow`; they are slow unless marked fast.

    Those that only build a model, in the process that all such tests share, are fast too.
    """
    items.sort(key=lambda item: item.path.parent in REAL)
    for item in items:
        is_fast = item.get_closest_marker("fast") or "build" in item.fixturenames
        if item.path.parent in REAL and not is_fast:
            item.add_marker(pytest.mark.slow)
