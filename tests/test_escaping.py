"""File names and users' strings in what is printed and exported: shown as text, on their row, obeyed by nothing."""

import ast
import io
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from simulated_runs import BASELINE, MACHINE, a_record

from autotune.data.errors import WorkloadError
from autotune.data.printable import one_line
from autotune.data.record import Outcome, Phase
from autotune.data.run_directory import RunDirectory, RunRecord, WorkloadRecord
from autotune.front import cli
from autotune.front.console import Progress, show_error
from autotune.front.results import show_answer, show_comparison, show_history
from autotune.recipe.advice import answer_at
from autotune.recipe.recipe import Recipe
from autotune.report.history import compare, load_history, write_csv
from autotune.stats.deciding import Verdict
from autotune.tuning.events import Began, Notice, RunBegan, TrialBegan, TrialEnded

MARKUP = ["name", "[red]", "[/red]", "[/nothing]", ":smile:", '"', "'", "\\", ",", "ü"]
CONTROLS = ["\x1b[31m", "\x1b]0;title\x07", "\r", "\n", "\t", "\x85", "\u2028", "\u202e", "\x9b2J", "\x7f"]
PIECES = st.sampled_from(MARKUP + CONTROLS)
STRINGS = st.one_of(st.lists(PIECES, max_size=6).map("".join), st.text(max_size=20))
NAMES = STRINGS.map(lambda text: text.replace("\0", "").replace("/", "")).filter(lambda text: text.strip(". \n"))
NASTY = "[red]n\x1b[31m\n\u202e[/red].x"


def screen(terminal=False):
    """A console that writes into memory."""
    return Console(
        file=io.StringIO(), width=2000, force_terminal=terminal, color_system=None, highlight=False, emoji=True
    )


def printed(draw):
    """What is drawn, once it is seen to hold nothing but printable characters and line breaks."""
    output = screen()
    draw(output)
    text = output.file.getvalue()
    assert text.replace("\n", "").isprintable()
    return text


def write_run(path, text, trials=2):
    """A run in whose every field of free text stands `text`."""
    directory = RunDirectory(path)
    (path / "trials").mkdir(parents=True, exist_ok=True)
    machine = MACHINE.model_copy(update={"cpu": text, "driver": text})
    workload = WorkloadRecord(name=text, reference=text, fingerprint=text, batch_size=32)
    directory.write_run(
        RunRecord(
            run=text,
            started_at="2026-11-20T10:00:00+00:00",
            machine=machine,
            workload=workload,
            baseline=dict(BASELINE),
            arguments={"space": text},
        )
    )
    for number in range(trials):
        directory.write_trial(a_record(trial=number, outcome=Outcome.ERROR, reason=text, log_tail=text))


@pytest.fixture(scope="module")
def written(recipes):
    """A recipe's JSON."""
    return recipes[Verdict.FASTER].to_json()


def recipe_with(written, text, **evidence_changes):
    """The recipe, `text` in its every field of free text, with changes of its evidence."""
    document = json.loads(written)
    document["workload"]["name"] = document["workload"]["fingerprint"] = text
    document["workload"]["takes_config"] = True
    document["created_by"]["run"] = document["created_by"]["search_space"] = text
    document["machine"]["cpu"] = text
    evidence = document["evidence"]
    evidence["verdict"] = "no_significant_gain"
    evidence["stability"] = {
        "checks": [{"name": text, "passed": False, "value": None, "limit": None, "detail": text}],
        "not_checked": [text],
    }
    document["candidate"] = {"configuration": document["baseline"], "speedup": evidence["speedup"], "reason": text}
    evidence["watch"] = {"seconds": 1.0, "throughput": None, "checks": [], "failure": text}
    evidence.update(evidence_changes)
    return Recipe.parse(json.dumps(document), source="a.json")


# --------------------------------------------------------------------------------------------- each output


@given(STRINGS)
def test_progress_draws_a_line_for_each_event(text):
    events = [
        RunBegan(directory=Path(f"results/{text}"), workload=text, budget=180.0),
        Began(text=text),
        TrialBegan(trial=3, phase=Phase.SEARCH, configuration=BASELINE, changes=text),
        TrialEnded(record=a_record(outcome=Outcome.ERROR, reason=text), changes=text),
        Notice(text=text),
    ]

    def draw(output):
        with Progress(output, clock=lambda: 0.0) as progress:
            for event in events:
                progress(event)

    assert len(printed(draw).split("\n")) == len(events)  # one of them has no line, and the last line an end
    output = screen(terminal=True)  # there the status block is redrawn, by escape sequences that set no colours
    draw(output)
    assert not re.search("\x1b\\[[0-9;]*m|\x1b[^\\[]|[\x80-\x9f\u202e]", output.file.getvalue())


@given(NAMES)
def test_the_lines_for_training_code_name_any_recipe(written, text):
    path = Path(text)
    recipe = recipe_with(written, "plain")
    shown = printed(lambda output: show_answer(answer_at(recipe, path, "train.py"), path, output))
    line = next(line for line in shown.split("\n") if "Recipe.load" in line)
    (argument,) = (node for node in ast.walk(ast.parse(line.strip())) if isinstance(node, ast.Constant))
    assert ast.literal_eval(argument) == str(path)


@given(text=NAMES, tuned=NAMES)
def test_the_command_that_goes_on_is_one_line_for_any_name(written, text, tuned):
    recipe = recipe_with(written, "plain", verdict="undecided", go_on_seconds=60.0)
    path = Path("results") / text / "recipe.json"
    shown = printed(lambda output: show_answer(answer_at(recipe, path, tuned), path, output))
    (command,) = (line for line in shown.replace(" \\\n   ", "").split("\n") if "--resume" in line)
    if one_line(text + tuned) == text + tuned:
        words = ["autotune", "tune", tuned, "--resume", str(path.parent), "--budget", "60s"]
        assert shlex.split(command.removeprefix("Go on: ")) == words


@pytest.mark.parametrize("text", [NASTY, "[/nothing]", ":smile:"])
def test_markup_and_escapes_are_text_on_their_row(tmp_path, capsys, written, text):
    write_run(tmp_path / "run", text)
    shown = one_line(text)
    assert printed(lambda output: show_comparison(compare(tmp_path), output)).count(shown) == 3
    assert shown in printed(lambda output: show_history(load_history(tmp_path), output))
    assert shown in printed(lambda output: show_answer(recipe_with(written, text).answer, Path(text), output))
    show_error(WorkloadError(f"x{text}", hint=f"y{text}", detail=text))
    said = capsys.readouterr().err
    assert said.replace("\n", "").isprintable()
    assert said.split("\n")[:2] == [f"autotune: x{shown}", f"y{shown}"]
    write_run(tmp_path / "other", "plain")
    rows = printed(lambda output: show_comparison(compare(tmp_path), output)).split("\n")
    assert len([row for row in rows if "no recipe" in row]) == 2
    frame = load_history(tmp_path)
    assert len(printed(lambda output: show_history(frame, output)).split("\n")) == 4 + 2 * 2 + 2
    write_csv(frame, tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert len(lines) == 4 + 1
    assert all(line.isprintable() for line in lines)


# --------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("command", ["show", "compare", "tune", "frob"])
@pytest.mark.parametrize("name", [NASTY, f"{NASTY}.py", "\udcff.py", "x" * 5000, "[/x].py:a"], ids=range(5))
def test_a_name_that_is_nowhere_is_refused_in_printable_lines(capsys, tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.replace("\n", "").isprintable()
    assert "internal error" not in captured.err


@pytest.mark.parametrize("name", [NASTY, "\udcff"])
def test_files_with_such_names_are_read_and_shown(capsys, tmp_path, written, name):
    folder = tmp_path / name
    write_run(folder, NASTY)
    (folder / "recipe.json").write_text(written)
    for command in (["show", folder], ["show", folder / "recipe.json"], ["compare", folder]):
        assert cli.main([str(each) for each in command]) == 0
    assert cli.main(["show", str(folder), "--csv", str(folder / "table.csv")]) == 0
    captured = capsys.readouterr()
    assert (captured.out + captured.err).replace("\n", "").isprintable()
    assert one_line(name) in captured.out
    captured.out.encode()


def test_a_pipe_in_place_of_a_script_is_not_waited_for(capsys, tmp_path):
    os.mkfifo(tmp_path / "fifo.py")
    assert cli.main(["tune", str(tmp_path / "fifo.py")]) == 2
    assert "a pipe or a device" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--out", "\udcff"], ["--space", "\udcff.toml"]], ids=["out", "space"])
def test_a_run_is_not_begun_where_names_cannot_be_written_down(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[1] / "examples" / "digits_mlp.py"
    assert cli.main(["tune", str(example), *arguments]) == 2
    assert r"\udcff" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_workload_whose_path_cannot_be_written_down_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "\udcff.py").write_text("workload = 1\n")
    assert cli.main(["tune", "\udcff.py"]) == 2
    assert "its path is not UTF-8" in capsys.readouterr().err


def test_any_name_of_a_search_space_stands_in_run_json(tmp_path):
    record = RunRecord(run="r", started_at="t", machine=MACHINE, arguments={"space": "\udcff.toml", "seed": 1})
    assert record.arguments == {"space": r"\udcff.toml", "seed": 1}
    assert RunRecord.model_validate_json(record.model_dump_json()) == record
