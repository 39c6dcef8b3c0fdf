"""Removes what a script's trials have made."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path


def remove_created(listed: Path, directories: Sequence[str]) -> None:
    """Remove what trials have made below these directories, by the list that they kept.

    A directory that they have made goes as a whole, or stays where it holds what is not on the list.
    """
    try:
        made = listed.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    known = {each for each in made if each.startswith(tuple(os.path.join(each, "") for each in directories))}
    kept: list[str] = []
    for path in sorted(known, key=len):
        if path.startswith(tuple(kept)):
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            if all(os.path.join(root, each) in known for root, _, files in os.walk(path) for each in files):
                shutil.rmtree(path, ignore_errors=True)
            else:
                kept.append(os.path.join(path, ""))
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
    listed.unlink(missing_ok=True)
