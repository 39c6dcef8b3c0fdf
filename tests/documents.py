"""The pages README.md, CONTRIBUTING.md and docs/, and their code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    page.name: page for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}


def code_blocks(page: str, language: str) -> list[str]:
    """Return the code of a page in a language, block by block."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page].read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
