"""Order of the suite, and the surroundings that all tests share."""

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "without a clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("without a clock")  # a machine that is busy breaks no property


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the fast tests first: a mistake shows before the first `import tensorflow`."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
