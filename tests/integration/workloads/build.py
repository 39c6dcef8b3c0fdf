"""Builds what a trial of each requested case trains, and takes its first step; all cases in this one process.

Reads a case's name and a trial's request from a line of JSON, and answers with the trial's messages and what the
workload printed, as a line of JSON.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import cases

from autotune.runtime import protocol
from autotune.script import runner


class Tuner:
    """Keeps a trial's messages, and goes away after its first step."""

    def __init__(self) -> None:
        self.told = {}

    def send(self, message) -> None:
        """Keep a message."""
        self.told[message.kind] = message.model_dump(mode="json")
        if message.kind == "first_step":
            raise protocol.ChannelClosed("one step is enough")


answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    request = protocol.TrialRequest.model_validate_json(line)
    Path(request.log).touch()
    cases.log = lambda path=request.log: Path(path)
    tuner, printed = Tuner(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        runner.run(request, tuner, cases.workload, None)
    answers.write(json.dumps([tuner.told, printed.getvalue()]) + "\n")
    answers.flush()
