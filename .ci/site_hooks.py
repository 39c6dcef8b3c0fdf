"""What `mkdocs build` changes in pages."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page of the site, without links to files that are not in it, and with each command's name once."""
    inside = re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
    # cyclopts repeats a command's name where the app writes the usage line itself.
    return re.sub(r"^(autotune (\w+)) \2\b", r"\1", inside, flags=re.MULTILINE)
