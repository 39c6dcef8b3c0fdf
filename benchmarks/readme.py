"""Make the README's pictures, and the output that it quotes, from recorded runs.

    python benchmarks/readme.py [--record]

The pictures go to docs/pictures, in light and dark: the terminal of command one, the bars of five trainings, and the
page of command one's run, which needs Chromium. The README gets the end of that run, and what `autotune run` says after
it.

With `--record`, command one and that run come first, and replace the recorded ones.
"""

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text

from autotune.data.figures import Interval
from autotune.data.files import write_atomically
from autotune.data.run_directory import RunDirectory
from autotune.recipe.recipe import Recipe
from autotune.report.page import write_page

ROOT = Path(__file__).resolve().parent.parent
WORKLOAD = "train_shapes"
COMMAND, AFTERWARDS = "autotune demo", f"autotune run results/{WORKLOAD}/latest/recipe.json"
RUN = ROOT / "results" / "recorded" / "cpu" / "two_cores" / "command_one"
OUTPUT, LAST_LINES = "terminal.txt", "long_run.txt"
"""Of the tuning, and of the training with its recipe."""
LEARNING = ROOT / "results" / "recorded" / "learning"
"""Recipes of the scripts in `benchmarks/learning`, one file each."""
PICTURES = ROOT / "docs" / "pictures"
FIRST_LINES = 8
"""Lines of the output that the picture of the terminal begins with."""
STYLES = {
    r"^\$ .*|^Recommended: .*": "bold",
    r"^Faster: .*": "bold green",
    r"(?<=  )×[\d.]+( \(uncertain\))?(?=  )": "green",
    r"(?<=\d  )note: .*": "yellow",
}
"""As `autotune tune` colours its lines."""
ELIDED = "  …"
PAGE_SIZE = 1280, 900
CHROMIUM_FLAGS = "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of pictures, and how to ask for them.

    Args:
        terminal: Of a terminal.
        text: Of words and axes.
        bars: Of the training as it is, of the same training, and of a larger batch.
        flags: With which Chromium takes a page's colours for this theme.
    """

    terminal: TerminalTheme
    text: str
    bars: tuple[str, str, str]
    flags: tuple[str, ...] = ()


ON_LIGHT = [(36, 41, 47), (207, 34, 46), (17, 99, 41), (125, 78, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131)]
"""The terminal's colours, in the order of ANSI."""
THEMES = {
    "light": Theme(
        terminal=TerminalTheme((246, 248, 250), (31, 35, 40), [*ON_LIGHT, (110, 119, 129)]),
        text="#1f2328",
        bars=("#8a93a0", "#0969da", "#b8721b"),
    ),
    "dark": Theme(
        terminal=SVG_EXPORT_THEME,
        text="#e6edf3",
        bars=("#8a93a0", "#58a6ff", "#d29922"),
        flags=("--blink-settings=preferredColorScheme=0",),
    ),
}


# ---------------------------------------------------------------------------------------------- the terminal


def read_output(run: Path) -> list[str]:
    """Return the lines that a recorded run has printed."""
    return (run / OUTPUT).read_text(encoding="utf-8").splitlines()


def quoted_end(run: Path) -> list[str]:
    """Return what the README quotes: how the run ends, and the last lines of the training with its recipe."""
    output = read_output(run)
    last = (run / LAST_LINES).read_text(encoding="utf-8").splitlines()
    return [*output[find_line(output, "Faster:") :], "", f"$ {AFTERWARDS}", ELIDED, *last]


def shown_lines(run: Path) -> list[str]:
    """Return what the picture of the terminal shows: the command, first lines, confirmed trials, and the end."""
    output = read_output(run)
    trials = [line for line in output[: find_line(output, "Faster:")] if not re.search(r"\d  (note:|…) ", line)]
    later = [line for line in trials[FIRST_LINES:] if "  (confirmed " in line]
    return [f"$ {COMMAND}", *trials[:FIRST_LINES], *([ELIDED, *later] if later else []), "", *quoted_end(run), ""]


def find_line(lines: Sequence[str], start: str) -> int:
    """Return the place of the first line that begins so."""
    return next(place for place, line in enumerate(lines) if line.startswith(start))


def terminal_picture(lines: Sequence[str], theme: Theme) -> str:
    """Return lines of a terminal as SVG, which loads no font."""
    width = max(map(len, lines))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in lines:
        text = Text(line)
        for pattern, style in STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text)
    picture = console.export_svg(title="autotune", theme=theme.terminal, unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


# -------------------------------------------------------------------------------------------------- the bars


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Both answers of a run: how much sooner each reaches the same losses."""

    name: str
    same: Interval | None
    larger: Interval | None


def read_answers(folder: Path) -> list[Answers]:
    """Return the answers of the recipes in a folder, by name."""
    return [answers_of(file.stem, Recipe.load(file)) for file in sorted(folder.glob("*.json"))]


def answers_of(name: str, recipe: Recipe) -> Answers:
    """Return the answers of a recipe; a larger batch counts if it surely reaches the same losses sooner."""
    same, larger = recipe.same_training, recipe.larger_batch
    rule = None if larger is None else larger.learning_rate_rule
    same_loss = None if rule is None else rule.same_loss
    return Answers(
        name=name,
        same=same.speedup if same is not None and same.confirmed else None,
        larger=same_loss.speedup if same_loss is not None and same_loss.speedup.low > 1 else None,
    )


WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 760, 150, 150, 15, 16, 34


def bars_picture(trainings: Sequence[Answers], theme: Theme) -> str:
    """Return the speeds of trainings, with 95% intervals, as bars in SVG: as it is, same training, larger batch."""
    longest = max(interval.high for training in trainings for interval in (training.same, training.larger) if interval)
    scale = (WIDTH - LEFT - RIGHT) / longest
    group = 3 * BAR + GAP
    height = TOP + group * len(trainings) + GAP
    labels = ("as it is", "same training", "larger batch, to the same losses")
    parts = [*_legend(labels, theme)]
    for place, training in enumerate(trainings):
        top = TOP + GAP + group * place
        parts.append(_words(LEFT - 12, top + 2 * BAR - 4, training.name, theme.text, anchor="end"))
        unit = Interval(value=1.0, low=1.0, high=1.0)
        for row, (interval, colour) in enumerate(zip((unit, training.same, training.larger), theme.bars, strict=True)):
            parts += _bar(top + row * BAR, interval, row, colour, scale, theme)
    title = "Speed of five trainings: as they are, with the same training, and with a larger batch"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12.5"><title>{title}</title>{"".join(parts)}</svg>\n'
    )


def _legend(labels: Sequence[str], theme: Theme) -> Iterator[str]:
    left = LEFT
    for label, colour in zip(labels, theme.bars, strict=True):
        yield f'<rect x="{left}" y="10" width="12" height="12" fill="{colour}"/>'
        yield _words(left + 18, 21, label, theme.text)
        left += 50 + 7 * len(label)


def _bar(top: float, interval: Interval | None, row: int, colour: str, scale: float, theme: Theme) -> Iterator[str]:
    """Yield a bar with its interval and figure; where there is none, what that means."""
    middle = top + BAR / 2 - 1
    if interval is None:
        missing = "nothing faster was shown" if row == 1 else "not shown to be sooner"
        yield _words(LEFT, middle + 4, missing, theme.text, opacity=0.65)
        return
    end = LEFT + scale * interval.value
    yield f'<rect x="{LEFT}" y="{top}" width="{end - LEFT:.1f}" height="{BAR - 3}" fill="{colour}"/>'
    if interval.low == interval.high:
        return
    low, high = (LEFT + scale * bound for bound in (interval.low, interval.high))
    cap = f"M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8M{low:.1f} {middle}H{high:.1f}"
    yield f'<path d="{cap}" stroke="{theme.text}" fill="none"/>'
    yield _words(high + 6, middle + 4, interval.shown(form=".3g"), theme.text)


def _words(x: float, y: float, text: str, colour: str, *, anchor: str = "start", opacity: float = 1.0) -> str:
    shown = f' opacity="{opacity}"' if opacity < 1 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{shown}>{escape(text)}</text>'


# -------------------------------------------------------------------------------------------------- the page


def photograph_page(run: Path, file: Path, theme: Theme) -> None:
    """Write the top of a run's page as PNG, as Chromium shows it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("readme.py: Chromium is not installed (Debian: chromium)")
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # the page shows the run's path
        copy = Path("results", WORKLOAD, RunDirectory(run).read_run().run)
        page = write_page(shutil.copytree(run, copy)).absolute()
        width, height = PAGE_SIZE
        flags = (*CHROMIUM_FLAGS, f"--user-data-dir={scratch}/profile", f"--window-size={width},{height}")
        command = [chromium, *flags, *theme.flags, f"--screenshot={file}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


# ------------------------------------------------------------------------------------------------- recording


def run_command(command: str, folder: str, stderr: int | None = None) -> str:
    """Run a command of autotune in a folder, and return what it prints, in that order."""
    words = [sys.executable, "-m", "autotune", *command.split()[1:]]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    ended = subprocess.run(words, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
    return ended.stdout


def record_run() -> None:
    """Run command one and the training away from this checkout; keep the run and what they print, without logs."""
    with tempfile.TemporaryDirectory() as scratch:
        printed = run_command(COMMAND, scratch)
        trained = run_command(AFTERWARDS, scratch, stderr=subprocess.STDOUT)
        run = Path(scratch, "results", WORKLOAD, "latest").resolve()
        shutil.rmtree(RUN, ignore_errors=True)
        for file in [run / "run.json", run / "recipe.json", *sorted(run.glob("trials/*/result.json"))]:
            kept = RUN / file.relative_to(run)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(file.read_text(encoding="utf-8").replace(scratch, "/autotune"), encoding="utf-8")
        (RUN / OUTPUT).write_text(printed, encoding="utf-8")
        (RUN / LAST_LINES).write_text("\n".join(trained.splitlines()[-2:]) + "\n", encoding="utf-8")


def main() -> None:
    """Record where asked to, draw, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="run command one again first")
    if parser.parse_args().record:
        record_run()
    PICTURES.mkdir(exist_ok=True)
    trainings = read_answers(LEARNING)
    for name, theme in THEMES.items():
        write_atomically(PICTURES / f"terminal-{name}.svg", terminal_picture(shown_lines(RUN), theme))
        write_atomically(PICTURES / f"speed-ups-{name}.svg", bars_picture(trainings, theme))
        photograph_page(RUN, PICTURES / f"page-{name}.png", theme)
    readme = ROOT / "README.md"
    parts = re.split(r"(?<=```text\n)(.*?)(?=```)", readme.read_text(encoding="utf-8"), maxsplit=1, flags=re.DOTALL)
    write_atomically(readme, "".join([parts[0], *(f"{line}\n" for line in quoted_end(RUN)), parts[2]]))


if __name__ == "__main__":
    main()
