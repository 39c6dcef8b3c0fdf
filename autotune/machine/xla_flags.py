"""Which flags of XLA the installed TensorFlow lacks: an unknown one ends the process that first compiles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable

from autotune.space.knobs import KNOBS
from autotune.space.variables import XLA, flags

ASK_SECONDS = 120
_COMPILE = "import tensorflow as tf; tf.function(lambda x: x + 1.0, jit_compile=True)(tf.constant(1.0))"
Ask = Callable[[str], tuple[int, str]]


def _ask(text: str) -> tuple[int, str]:
    """How a process ends that compiles with these flags, and what it says. It sees no GPU."""
    variables = {**os.environ, XLA: text, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _COMPILE]
    try:
        ended = subprocess.run(
            command, env=variables, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return ended.returncode, ended.stderr


def lacking(names: Iterable[str], ask: Ask = _ask) -> dict[str, str]:
    """Of these knobs those that cannot be set here, with the reason: one process is asked for all of them."""
    wanted = [name for name in names if name in KNOBS and KNOBS[name].variable == XLA]
    if not wanted:
        return {}
    variables: dict[str, str] = {}
    for name in wanted:
        KNOBS[name].set(variables, KNOBS[name].default)
    status, said = ask(variables[XLA])
    if status == 0:
        return {}
    # As xla/parse_flags_from_env.cc says it.
    found = re.search(rf"Unknown flags? in {XLA}: (.*)", said)
    unknown = [name for name in flags({XLA: found[1]}, XLA) if name in wanted] if found else []
    if unknown:
        return dict.fromkeys(unknown, "the installed TensorFlow has no such flag of XLA")
    return dict.fromkeys(wanted, "the installed TensorFlow could not be asked for XLA's flags")
