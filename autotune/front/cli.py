"""The command line: arguments in, an exit code out."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from cyclopts import CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownOptionError

from autotune.data.errors import ArgumentError, AutotuneError, DamagedRunWarning, TuningInterruptedError
from autotune.front.commands import app


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into this program's own words, and `--` with a script's.

    `autotune run` needs no `--` after its script.
    """
    if given[:1] != ["run"]:
        end = given.index("--") if "--" in given else len(given)
        return given[:end], given[end:]
    words = 0
    for index, token in enumerate(given[1:], start=1):
        if token == "--":
            return given[:index], given[index:]
        takes_value = given[index - 1] == "--scale-learning-rate"
        words += not token.startswith("-") and not takes_value
        if words == 2:
            return given[: index + 1], ["--", *given[index + 1 :]]
    return given, []


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line; the process's own when None.

    Returns:
        The exit code: 0 done, 1 a claim that does not hold, 2 wrong arguments or input, 3 no stable configuration,
        4 internal error, 130 interrupted.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
    for number in before:
        with contextlib.suppress(ValueError):  # in a thread signals are its owner's
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C, also where no run notes it
    out, err = _Lenient(sys.stdout), _Lenient(sys.stderr)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _main(list(sys.argv[1:] if arguments is None else arguments))
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError):
                signal.signal(number, handler)
        out.flush()
        err.flush()
    return code if isinstance(code, int) else code()  # a script writes and dies as it does without autotune


def _main(given: list[str]) -> int | Callable[[], int]:
    """Run one command; return the exit code, or the function that replaces this program."""
    own, rest = _split(given)
    tokens = [token for token in own if token not in ("--debug", "-m")]  # -m: a module is known by its name
    for_file = bool(rest) and tokens[:1] in (["tune"], ["verify"], ["run"])
    try:
        command, bound, unparsed = app.parse_args(
            tokens if for_file else tokens + rest, exit_on_error=False, print_error=False
        )
        if "args" in unparsed:
            bound.arguments["args"] = rest[1:] if for_file else None
        with _damage_as_notes():
            code = command(*bound.args, **bound.kwargs)
        return code if isinstance(code, int) or callable(code) else 0
    except CycloptsError as error:
        problem: AutotuneError = ArgumentError(str(error), hint=_next_step(error, own, rest))
    except KeyboardInterrupt:
        problem = TuningInterruptedError("interrupted")
    except Exception as error:
        if "--debug" in own:
            traceback.print_exc()
        hint = "This is a bug in autotune; rerun with --debug."
        internal = AutotuneError(f"internal error: {type(error).__name__}: {error}", hint=hint)
        problem = error if isinstance(error, AutotuneError) else internal
    from autotune.front.console import show_error

    show_error(problem)
    return problem.exit_code


def _next_step(error: CycloptsError, own: list[str], rest: list[str]) -> str:
    """Return the next step for a command line that cannot be read: a script's own options come after `--`."""
    unknown = (error.unused_tokens or [""])[0]
    if isinstance(error, UnknownOptionError):
        unknown = error.token.keyword or error.token.value
    places = [index for index, token in enumerate(own) if unknown and unknown in (token, token.partition("=")[0])]
    if own[:1] not in (["tune"], ["verify"]) or not places or isinstance(error, MissingArgumentError):
        return "See `autotune --help` and `autotune COMMAND --help`."
    first, end = places[0], places[0] + 1
    while end < len(own) and (not own[end].startswith("-") or re.fullmatch(r"-[\d.]\S*", own[end])):
        end += 1
    if own[0] == "tune" and end == len(own) > first + 1 and all(token.startswith("-") for token in own[1:first]):
        end -= 1  # the last word is the script
    words = shlex.join(["autotune", *own[:first], *own[end:], "--", *own[first:end], *rest[1:]])
    return f"Options of the script come after `--`: {words}"


@contextlib.contextmanager
def _damage_as_notes() -> Iterator[None]:
    """Show each warning about a damaged run once, as a plain line."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DamagedRunWarning)
        usual, shown = warnings.showwarning, set[str]()

        def show(message: Warning | str, category: type[Warning], *others: Any, **named: Any) -> None:
            if not issubclass(category, DamagedRunWarning):
                usual(message, category, *others, **named)
            elif str(message) not in shown:
                from autotune.front.console import note

                shown.add(str(message))
                note(f"note: {message}")

        warnings.showwarning = show
        yield


class _Lenient:
    """A stream that replaces letters it lacks by `?`, and is silent once it is broken: no terminal ends a run."""

    def __init__(self, stream: TextIO | None) -> None:
        # One that was closed before Python began is None, and its descriptor free for a socket to take.
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"  # `reconfigure` would act on the script of `autotune run`, too
        with self._silent_once_broken():
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._silent_once_broken():
            self._stream.flush()

    @contextlib.contextmanager
    def _silent_once_broken(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with open(os.devnull, "wb") as nothing:  # its buffer would fail again when Python exits
                os.dup2(nothing.fileno(), self._stream.fileno())
