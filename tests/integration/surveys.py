"""Surveys small scripts in forks of one process that has imported TensorFlow; a line of JSON for each.

    python tests/integration/surveys.py FOLDER ANSWERS

Each subdirectory of FOLDER holds a `train.py`, which runs with that directory as the current one.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras  # noqa: F401  # so that no fork has to
import tensorflow as tf  # noqa: F401

from autotune.data.errors import WorkloadError
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.script.survey import survey


def main(folder: str, answers: Path) -> None:
    """Survey each."""
    for path in sorted(Path(folder).iterdir()):
        os.chdir(path)
        settings = path / "settings.json"
        given = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        args = given.pop("args", [])
        reference = WorkloadReference(
            file=str(path / "train.py"),
            search_path=(str(path),),
            args=tuple(args),
            script=ScriptSettings(scratch=str(path.parent.parent / f"{path.name}.scratch"), **given),
        )
        try:
            facts, waiting = survey(reference, {}, lambda: None)
            told = {"facts": facts.model_dump(mode="json")}
            if waiting is not None:
                os.killpg(waiting.pid, signal.SIGKILL)
                os.waitpid(waiting.pid, 0)
        except WorkloadError as error:
            told = {"message": error.message, "hint": error.hint, "detail": error.detail}
        with answers.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"name": path.name, **told}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
