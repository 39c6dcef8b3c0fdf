"""Coverage-guided fuzzing of what comes from others: `python tests/fuzz/fuzz.py --inputs 100000 recipe`.

Inputs that run a line of ours, or get an answer, that none before did are kept and changed further. Two engines:

- `own`, the default and what the tests run for a few seconds: the loop below, guided by `sys.settrace` over
  autotune and tomllib. It needs nothing but Python, so it runs wherever the tests do, repeats itself for the same
  `--seed`, and counts an answer that is new as coverage: most of the reading is done by pydantic's compiled code,
  whose branches no Python fuzzer sees.
- `--engine atheris`, by hand: Google's libFuzzer for Python (`pip install atheris`), the one of its kind that is
  still kept up. It compares values while it looks for new branches and is better at bytes. It stays optional because
  its wheels are of one platform and of some Pythons only.

Both use the changes of `mutations.py`, which keep a document a document. An input that breaks the property is written
to a file; `--repeat FILE` runs it alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HANG_SECONDS = 10.0
"""Wall-clock time after which an input hangs, as it does on a pipe that nobody writes to."""
LONGEST_CPU_SECONDS = 1.0
MOST_MEMORY_BYTES = 4 << 30
LARGEST_CORPUS = 4000
_OURS = tuple(os.path.dirname(str(importlib.util.find_spec(name).origin)) for name in ("autotune", "tomllib"))


class Hang(BaseException):
    """An input took too long. No `Exception`, so that nothing under test can catch it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An input that broke the property, and how."""

    data: bytes
    what: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a run: how many inputs, how many were kept, what they reached; and a fault, if there was one."""

    inputs: int
    kept: int
    lines: int
    answers: int
    fault: Fault | None = None


@contextlib.contextmanager
def _traced(lines: set[tuple[str, int]]) -> Iterator[None]:
    def line(frame, event, _):
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame, event, _):
        return line if frame.f_code.co_filename.startswith(_OURS) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    def give_up(*_):
        raise Hang(f"no answer after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_one(check, data: bytes, *, traced: bool = True, again: bool = True) -> tuple[set[object], str]:
    """What one input reached, and how it broke the property; an empty text where it did not.

    What hangs is run once more: perhaps it was the machine that did.
    """
    lines: set[tuple[str, int]] = set()
    began = time.process_time()
    try:
        with _no_longer_than(HANG_SECONDS), _traced(lines) if traced else contextlib.nullcontext():
            answer = check(data)
    except Hang as error:
        return run_one(check, data, traced=traced, again=False) if again else (set(), f"Hang: {error}")
    except Exception as error:
        return set(), f"{type(error).__name__}: {error}"
    spent = time.process_time() - began
    if spent > LONGEST_CPU_SECONDS:
        # Tracing slows everything down: judge by what it takes without.
        return run_one(check, data, traced=False, again=again) if traced else (set(), f"took {spent:.1f} s")
    return {*lines, answer}, ""


def fuzz(target, *, inputs: int, seed: int, tell=lambda line: None) -> Report:
    """Check the seeds, then inputs made from those that reached something new, until one breaks the property."""
    rng = random.Random(seed)
    corpus: list[bytes] = []
    reached: set[object] = set()
    answers = 0
    fault = None
    for number in range(inputs):
        if number < len(target.seeds):
            data = target.seeds[number]
        else:
            data = _picked(corpus, rng)
            for _ in range(rng.choice((1, 1, 2, 3))):
                data = target.change(data, rng)
        features, what = run_one(target.check, data)
        if what:
            fault = Fault(data=data, what=what)
            break
        if not features <= reached:
            answers += sum(isinstance(each, str) for each in features - reached)
            reached |= features
            _keep(corpus, data, rng)
        if number % 5000 == 4999:
            tell(
                f"{number + 1} inputs, {len(corpus)} kept, {len(reached) - answers} lines, {answers} answers"
            )
    return Report(
        inputs=number + 1, kept=len(corpus), lines=len(reached) - answers, answers=answers, fault=fault
    )


def _picked(corpus: list[bytes], rng: random.Random) -> bytes:
    """Half of the time what was found lately, which others were not yet made from."""
    return rng.choice(corpus[-20:] if rng.random() < 0.5 else corpus)


def _keep(corpus: list[bytes], data: bytes, rng: random.Random) -> None:
    if len(corpus) == LARGEST_CORPUS:
        corpus.pop(rng.randrange(len(corpus)))
    corpus.append(data)


# -------------------------------------------------------------------------------------------- the command


def _fuzz_with_atheris(name: str, inputs: int, seed: int) -> None:
    """Hand over to libFuzzer, which ends the process; it writes an input that breaks the property to a file."""
    import atheris

    with atheris.instrument_imports(include=["autotune", "tomllib"]):
        from targets import TARGETS
    target = TARGETS[name]
    left = iter(target.seeds)

    def change(data: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)
        if (fresh := next(left, None)) is not None:
            return fresh[:most]
        return atheris.Mutate(data, most) if rng.random() < 0.3 else target.change(data, rng)[:most]

    def check(data: bytes) -> None:
        target.check(data)

    limits = [
        f"-runs={inputs}",
        f"-seed={seed + 1}",
        "-max_len=60000",
        "-len_control=0",
        "-rss_limit_mb=4096",
    ]
    timeout = f"-timeout={HANG_SECONDS:.0f}"
    atheris.Setup([sys.argv[0], *limits, timeout], check, custom_mutator=change)
    atheris.Fuzz()


def main() -> int:
    """Fuzz one target by hand."""
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing of a file format.")
    parser.add_argument("target", choices=("recipe", "space", "run"))
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    parser.add_argument("--repeat", type=Path, help="check the input in this file, and no other")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, resource.RLIM_INFINITY))
    if options.engine == "atheris":
        _fuzz_with_atheris(options.target, options.inputs, options.seed)
    from targets import TARGETS

    target = TARGETS[options.target]
    if options.repeat:
        target.check(options.repeat.read_bytes())
        return 0
    began = time.monotonic()
    report = fuzz(
        target, inputs=options.inputs, seed=options.seed, tell=lambda line: sys.stdout.write(f"{line}\n")
    )
    spent = time.monotonic() - began
    sys.stdout.write(
        f"{options.target}: {report.inputs} inputs in {spent:.0f} s, {report.kept} kept, {report.lines} lines, "
        f"{report.answers} answers\n"
    )
    if report.fault:
        file = Path(f"fault-{options.target}-{options.seed}")
        file.write_bytes(report.fault.data)
        sys.stdout.write(f"{report.fault.what}\nrepeat with: --repeat {file} {options.target}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
