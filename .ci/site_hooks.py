"""What `mkdocs build` mends in pages that plugins have made."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page whose usage lines name a command once: cyclopts repeats the name where the app writes the usage."""
    return re.sub(r"^(autotune (\w+)) \2\b", r"\1", markdown, flags=re.MULTILINE)
