"""What is fuzzed: the formats that come from others, and what must hold whatever stands in them.

An input is bytes. Checking it either finds that it was read, or that it was refused as documented: by the one
error class of the format, with a message of one printable line and bounded length. What was read is the same
when it is written and read once more, and what is shown of it drives no terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutations import LONGEST_INPUT, change_bytes, change_json_text, change_toml
from rich.console import Console
from test_recommendation import run_that_is

from autotune import console
from autotune.devices.machine import Machine
from autotune.errors import AutotuneError, RecipeError, RunDirectoryError, SearchSpaceError
from autotune.recipe.apply import environment
from autotune.recipe.recipe import Recipe
from autotune.record import TrialRecord
from autotune.report.compare import compare_runs
from autotune.report.frame import load_history
from autotune.run_directory import LARGEST_FILE_BYTES, RunDirectory, RunRecord, SearchSpaceRecord
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import KNOBS, Device
from autotune.space.search_space import LARGEST_NUMBER_OF_CHOICES, SearchSpace
from autotune.stats.deciding import Verdict

ROOT = Path(__file__).parents[2]
LONGEST_MESSAGE = 1000
NASTY_NAME = "my\n\x1b[31m[red]\u202e\udcff.file"
ALLOWED_VARIABLES = {("TF_ENABLE_ONEDNN_OPTS", "0"), ("TF_ENABLE_ONEDNN_OPTS", "1")}
HERE = Machine(
    cpu="simulated",
    cores=2,
    memory_bytes=8 << 30,
    platform="Linux x86_64",
    python="3.11.7",
    packages={},
    gpus=(),
    driver=None,
    cuda=None,
    cudnn=None,
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One format.

    Args:
        check: Raises where the property is broken; returns what the input was answered with, in short, so that
            another answer counts as something new.
        seeds: Valid inputs.
        change: Another input made of one.
    """

    check: Callable[[bytes], str]
    seeds: tuple[bytes, ...]
    change: Callable[[bytes, random.Random], bytes] = field(repr=False)


# ------------------------------------------------------------------------------------------ what must hold


def check_refusal(error: Exception, message: str) -> str:
    """A refusal is one printable line of bounded length, whatever it speaks of, and tells no traceback."""
    assert message, "nothing is said"
    assert message.isprintable(), f"not one printable line: {message!r}"
    assert len(message) <= LONGEST_MESSAGE, f"{len(message)} characters: {message[:200]!r}"
    if isinstance(error, AutotuneError):
        assert error.hint.isprintable(), f"not one printable line: {error.hint!r}"
        assert str(error) == "\n".join(filter(None, (error.message, error.hint))), (
            "more than message and hint"
        )
    return re.sub(r"'.*'|\S*/|[^a-z ]+", "", message)[:80]


def check_shown(draw: Callable[[Console], None]) -> str:
    """What is drawn is text and line breaks, neither more nor markup; returned for what else must hold."""
    output = io.StringIO()
    draw(Console(file=output, width=120, force_terminal=False, color_system=None, highlight=False))
    text = output.getvalue()
    rest = text.replace("\n", "")
    assert rest.isprintable(), (
        f"reaches the terminal: {[each for each in rest if not each.isprintable()][:5]}"
    )
    return text


# ------------------------------------------------------------------------------------------------- recipes


def check_recipe(data: bytes) -> str:
    """A recipe is refused, or sets what is allowed and comes back from its file as it was."""
    try:
        recipe = Recipe.parse(data, source=NASTY_NAME)
    except RecipeError as error:
        return check_refusal(error, error.message)
    assert Recipe.parse(recipe.to_json(), source="again") == recipe
    for configuration in (recipe.configuration, recipe.baseline):
        variables = environment(configuration)
        assert set(variables.items()) <= ALLOWED_VARIABLES, variables
    assert set(recipe.compile_args()) <= {"jit_compile", "steps_per_execution"}
    recipe.machine.differences(HERE)
    assert recipe.batch_size >= 1
    check_shown(lambda screen: console.show_recipe(recipe, Path(NASTY_NAME), screen))
    check_shown(lambda screen: console.show_usage(recipe, Path(NASTY_NAME), tuned=NASTY_NAME, console=screen))
    return "read"


# ------------------------------------------------------------------------------------------- search spaces

_SURROUNDINGS = [
    {"device": device, "cores": cores, "examples": examples, "dataset_takes_config": True}
    for device, cores, examples in (
        (Device.CPU, 1, None),
        (Device.CPU, 8, 1437),
        (Device.GPU, 4096, 10**12),
        (Device.GPU, 2, 0),
    )
]


def check_space(data: bytes) -> str:
    """A search space is refused, or gives every knob a handful of values that the knob can take."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "not text"
    try:
        space = SearchSpace.parse(text, source=NASTY_NAME)
    except SearchSpaceError as error:
        return check_refusal(error, error.message)
    assert SearchSpace.parse(text, source=NASTY_NAME) == space
    return "read: " + "; ".join(_check_resolved(space, surroundings) for surroundings in _SURROUNDINGS)


def _check_resolved(space: SearchSpace, surroundings: dict) -> str:
    baseline = baseline_configuration(32, {}, surroundings["device"], where="baseline")
    try:
        resolved = space.resolve(baseline=baseline, **surroundings)
    except SearchSpaceError as error:
        return check_refusal(error, error.message)
    for name, values in resolved.choices.items():
        assert 2 <= len(values) <= LARGEST_NUMBER_OF_CHOICES + 1, f"{name}: {len(values)} choices"
        assert all(value in KNOBS[name].domain for value in values)
        assert baseline[name] in values
    record = SearchSpaceRecord(
        source=space.source, choices=dict(resolved.choices), left_out=dict(resolved.left_out)
    )
    assert SearchSpaceRecord.model_validate_json(record.model_dump_json()).choices == record.choices
    check_shown(lambda screen: console.show_space(space.source, resolved, screen))
    return f"{len(resolved.choices)} knobs"


# ----------------------------------------------------------------------------------------- run directories
#
# An input is a list of entries, two null bytes between them: a path, a null byte, a letter for what lies there,
# and its content.

_LINKS = (
    "run.json",
    ".",
    "..",
    "/dev/zero",
    "/dev/null",
    "missing",
    "trials",
    "loop",
    "/proc/self/mem",
    "0001",
)
_BELOW = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
_PATHS = (
    *("run.json", "recipe.json", "trials", "trials/0000/result.json", "trials/0001/result.json", "loop"),
    *(
        "trials/0001",
        "trials/9999999999/result.json",
        "study.db",
        "a/b/run.json",
        "trials/\udcff/result.json",
    ),
    *("\n\x1b[31m\udcff/run.json", "[red]/run.json", "trials/" + "n" * 255 + "/result.json"),
)


def check_run(data: bytes) -> str:
    """A run directory is refused, or its records come back as they were; the table holds a line for each trial."""
    with tempfile.TemporaryDirectory(prefix="autotune-fuzz-", dir=_BELOW) as folder:
        path = Path(folder, NASTY_NAME)
        path.mkdir()
        _lay_out(data, path)
        answers = [_check_records(RunDirectory(path))]
        if answers[0].startswith("read") or zlib.crc32(data) % 4 == 0:
            answers += [_check_comparison(path), _check_table(path, zlib.crc32(data) % 4 == 0)]
    return "; ".join(answers)


def _check_records(directory: RunDirectory) -> str:
    try:
        run = directory.read_run()
        trials = list(directory.read_trials())
    except RunDirectoryError as error:
        return check_refusal(error, error.message)
    assert RunRecord.model_validate_json(run.model_dump_json()) == run
    for trial in trials:
        assert TrialRecord.model_validate_json(trial.model_dump_json()) == trial
    return f"read {len(trials)}"


def _check_comparison(path: Path) -> str:
    try:
        summaries = compare_runs(path)
    except (RunDirectoryError, RecipeError) as error:
        return check_refusal(error, error.message)
    check_shown(lambda screen: console.show_comparison(summaries, screen))
    return f"{len(summaries)} runs"


def _check_table(path: Path, whole: bool) -> str:
    if not whole:
        return ""
    try:
        frame = load_history(path)
    except RunDirectoryError as error:
        return check_refusal(error, error.message)
    text = check_shown(lambda screen: console.show_history(frame, screen))
    assert len(text.splitlines()) == len(frame) + 2
    assert len(frame.to_csv(index=False).splitlines()) == len(frame) + 1
    return f"{len(frame)} rows"


def _lay_out(data: bytes, root: Path) -> None:
    """Make what the input says; what cannot be made is left out."""
    for name, kind, content in _entries(data)[:40]:
        parts = [part[:255] for part in os.fsdecode(name).split("/") if part not in ("", ".", "..")]
        file = root.joinpath(*parts[:6])
        with contextlib.suppress(OSError, ValueError):
            if not _inside(root, file):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            match kind:
                case b"d":
                    file.mkdir()
                case b"p":
                    os.mkfifo(file)
                case b"l":
                    file.symlink_to(_LINKS[len(content) % len(_LINKS)])
                case b"h":
                    file.touch(exist_ok=False)
                    os.truncate(file, LARGEST_FILE_BYTES + 1)
                case b"s":
                    with socket.socket(socket.AF_UNIX) as listening:
                        listening.bind(str(file))
                case _ if not file.exists():
                    file.write_bytes(content)


def _inside(root: Path, file: Path) -> bool:
    """Whether nothing on the way to the file is a link: only what lies in the temporary directory is touched."""
    while file != root:
        if file.is_symlink():
            return False
        file = file.parent
    return True


def _entries(data: bytes) -> list[tuple[bytes, bytes, bytes]]:
    entries = []
    for entry in data.split(b"\0\0"):
        name, _, rest = entry.partition(b"\0")
        entries.append((name, rest[:1], rest[1:]))
    return entries


def _packed(entries: list[tuple[bytes, bytes, bytes]]) -> bytes:
    return b"\0\0".join(name + b"\0" + kind + content for name, kind, content in entries)


def change_run(data: bytes, rng: random.Random) -> bytes:
    """A file's content changed, mostly; or what lies at a path, or where it lies."""
    entries = _entries(data)
    at = rng.randrange(len(entries))
    name, kind, content = entries[at]
    match rng.randrange(12):
        case 0:
            entries[at] = (name, bytes([rng.choice(b"dplhsf")]), content[: rng.randrange(20)])
        case 1:
            entries[at] = (os.fsencode(rng.choice(_PATHS)), kind, content)
        case 2:
            made = (
                os.fsencode(rng.choice(_PATHS)),
                bytes([rng.choice(b"dplf")]),
                content[: rng.randrange(20)],
            )
            entries.insert(rng.randint(0, len(entries)), made)
        case 3:
            del entries[at]
        case 4:
            return change_bytes(data, rng)
        case _:
            entries[at] = (name, kind, change_json_text(content, rng).replace(b"\0", b"0"))
    return _packed(entries)


# ------------------------------------------------------------------------------------------------- targets


def _simulated_recipes() -> list[bytes]:
    """A recipe of each verdict, and one with a watch at its end."""
    with tempfile.TemporaryDirectory() as folder:
        made = [run_that_is(each, Path(folder, each))[0] for each in Verdict]
        made.append(run_that_is(Verdict.FASTER, Path(folder, "watched"), soak=10.0)[0])
    return [each.to_json().encode() for each in made]


def _simulated_run() -> bytes:
    """A run's baseline, a candidate and a leader, each with its first pair or slice, and its recipe."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, directory = run_that_is(Verdict.FASTER, Path(folder, "run"))
    files = {"run.json": directory.record.model_dump_json(), "recipe.json": recipe.to_json()}
    for number in (0, 1, recipe.evidence.confirmation.trials[-1]):
        record = directory.trials[number]
        short = record.model_copy(update={"pairs": record.pairs[:1], "slices": record.slices[:1]})
        files[f"trials/{number:04}/result.json"] = short.model_dump_json()
    return _packed([(name.encode(), b"f", content.encode()) for name, content in files.items()])


def _small_run() -> bytes:
    run = RunRecord(
        run="20261120-202820-d6a73d", started_at="2026-11-20T20:28:20+00:00", machine=HERE, arguments={}
    )
    trial = TrialRecord(
        trial=0,
        phase="baseline",
        configuration={"batch_size": 32},
        outcome="error",
        reason="why",
        started_at="2026-11-20T20:28:20+00:00",
        seconds=1.5,
    )
    return _packed(
        [
            (b"run.json", b"f", run.model_dump_json().encode()),
            (b"trials/0000/result.json", b"f", trial.model_dump_json().encode()),
        ]
    )


def _bounded(change: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    return lambda data, rng: change(data, rng)[:LONGEST_INPUT]


def _targets() -> dict[str, Target]:
    recipes = _simulated_recipes()
    spaces = tuple(each.read_bytes() for each in sorted((ROOT / "search_spaces").glob("*.toml")))
    compact = tuple(json.dumps(json.loads(each)).encode() for each in recipes)
    return {
        "recipe": Target(check=check_recipe, seeds=(*recipes, *compact), change=_bounded(change_json_text)),
        "space": Target(
            check=check_space,
            seeds=spaces,
            change=_bounded(lambda data, rng: change_toml(data, rng, rng.choice(spaces))),
        ),
        "run": Target(
            check=check_run,
            seeds=(_small_run(), _simulated_run()),
            change=_bounded(change_run),
        ),
    }


TARGETS = _targets()
