"""Order of the suite, and the surroundings that all tests share."""

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

RUNTIME = tempfile.TemporaryDirectory()
os.environ["XDG_RUNTIME_DIR"] = RUNTIME.name  # tests announce their runs here, apart from the user's own
TESTS = Path(__file__).parent

hypothesis.settings.register_profile(
    "without a clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("without a clock")  # a machine that is busy breaks no property


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run real trials last: a mistake shows before the first `import tensorflow`."""
    items.sort(key=lambda item: item.path.parent != TESTS)
