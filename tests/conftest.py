"""Order of the suite, and the surroundings that all tests share."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the fast tests first: a mistake shows before the first `import tensorflow`."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
