"""`--json`: every command prints one document of its schema, and nothing else on standard output."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from test_recommendation import run_that_is

from autotune.data.figures import Interval
from autotune.front import cli
from autotune.front.documents import DOCUMENTS, MODELS, schema_text
from autotune.report.history import columns
from autotune.script.long_run import PreparedRun
from autotune.stats.deciding import ClaimResult, Verdict
from autotune.tuning.events import Notice, RunBegan
from autotune.tuning.verify import Verification

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture
def printed(capsys):
    """`printed(words…)`: the only document that a command prints."""

    def command(*words):
        code = cli.main([*map(str, words), "--json"])
        out = capsys.readouterr().out
        document = json.loads(out)
        jsonschema.validate(document, json.loads(schema_text()))
        DOCUMENTS.validate_json(out)
        assert document["command"] == words[0]
        return code, document

    return command


def test_the_page_on_json_names_every_command_and_its_fields():
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|$", (DOCS / "history.md").read_text(), re.MULTILINE)
    told = {command: set(re.findall(r"`(\w+)`", text)) for command, text in rows}
    fields = {name: set(model.model_fields) - {"schema_version", "command"} for name, model in MODELS.items()}
    assert told == fields


def test_a_history_has_a_row_for_each_trial_with_every_column(printed, finished):
    code, document = printed("show", finished, finished.parent)
    assert (code, document["recipe"]) == (0, None)
    assert len(document["trials"]) == len(list((finished / "trials").iterdir()))
    assert all(list(row) == list(columns()) for row in document["trials"])


def test_a_comparison_has_a_row_for_each_run(printed, finished):
    _, document = printed("compare", finished)
    assert [row["verdict"] for row in document["runs"]] == ["faster"]


def test_a_run_is_shown_with_its_recipe_and_its_trials(printed, finished):
    _, document = printed("show", finished)
    assert document["recipe"] == json.loads((finished / "recipe.json").read_text())
    assert (document["run"], document["recipe_file"]) == (str(finished), str(finished / "recipe.json"))
    assert len(document["trials"]) > 2
    _, of_file = printed("show", finished / "recipe.json")
    assert (of_file["run"], of_file["trials"], of_file["recipe"]) == (None, [], document["recipe"])


def test_an_edit_is_no_json(capsys, finished):
    assert cli.main(["show", str(finished), "--diff", "train.py", "--json"]) == 2
    assert "--diff is for a single recipe" in capsys.readouterr().err


def test_all_knobs_are_printed(printed):
    _, document = printed("knobs")
    assert {"batch_size", "jit_compile"} < {knob["name"] for knob in document["knobs"]}


@pytest.mark.parametrize("verdict", [Verdict.FASTER, Verdict.UNDECIDED])
def test_a_tuning_prints_its_progress_on_standard_error(capsys, monkeypatch, tmp_path, verdict):
    recipe, directory = run_that_is(verdict, tmp_path / "run")

    def tune(workload, *, observe, **options):
        observe(RunBegan(directory=directory.path, workload="simulated", budget=18.0))
        observe(Notice(text="something once"))
        return recipe

    monkeypatch.setattr("autotune.front.tune.tune", tune)
    assert cli.main(["tune", "train.py", "--json"]) == 0
    out, err = capsys.readouterr()
    document = DOCUMENTS.validate_json(out)
    assert "something once" in err
    assert (document.run, document.recipe) == (str(directory.path), recipe)
    assert document.answer.headline == recipe.answer.headline
    goes_on = [command for command in document.answer.commands if command.name == "go on"]
    assert [command.lines[0].startswith("autotune tune train.py --resume") for command in goes_on] == (
        [True] if verdict is Verdict.UNDECIDED else []
    )


def test_a_verification_is_printed(printed, monkeypatch):
    claim = Interval(value=1.5, low=1.4, high=1.61)
    found = Verification(finding=ClaimResult.GONE, claimed=claim, measured=None, instances=0, reason="so it is")
    monkeypatch.setattr("autotune.tuning.verify.verify", lambda *_, **__: found)
    recipes = SimpleNamespace(recipe=None, path="recipe.json")
    monkeypatch.setattr("autotune.recipe.recipe.find_recipe", lambda *_, **__: recipes)
    code, document = printed("verify", "recipe.json", "train.py")
    assert (code, document["finding"], document["measured"]) == (1, "gone", None)


def test_a_run_ends_standard_output_with_a_line_of_its_own(capfd, monkeypatch):
    def run_script(reference):
        sys.stdout.write("the script's last words, within a line")
        sys.exit(7)

    monkeypatch.setattr("autotune.script.long_run.run_as_main", run_script)
    guard = SimpleNamespace(throughput=900.0, claimed=1000.0)
    prepared = PreparedRun(None, SimpleNamespace(guard=guard, ended=lambda: None))
    monkeypatch.setattr("autotune.script.long_run.prepare_run", lambda *_, **__: prepared)
    assert cli.main(["run", "--json", "recipe.json", "train.py", "--json"]) == 7
    first, last = capfd.readouterr().out.splitlines()
    assert first == "the script's last words, within a line"
    document = DOCUMENTS.validate_json(last)
    assert (document.exit_code, document.throughput, document.claimed) == (7, 900.0, 1000.0)


def test_failed_json_output_keeps_the_exit_code_of_the_script(capfd, monkeypatch):
    def run_script(reference):
        monkeypatch.setitem(sys.modules, "pandas", None)
        monkeypatch.delitem(sys.modules, "autotune.front.documents")
        sys.exit(7)

    monkeypatch.setattr("autotune.script.long_run.run_as_main", run_script)
    monkeypatch.setattr("autotune.script.long_run.prepare_run", lambda *_, **__: PreparedRun(None))
    assert cli.main(["run", "--json", "recipe.json", "train.py"]) == 7
    out, err = capfd.readouterr()
    assert out.strip() == ""
    assert "no JSON was printed: ModuleNotFoundError" in err


def test_the_module_prints_the_schema():
    done = subprocess.run(
        [sys.executable, "-m", "autotune.front.documents"], capture_output=True, text=True, check=True, cwd=DOCS.parent
    )
    assert set(json.loads(done.stdout)["discriminator"]["mapping"]) == set(MODELS)
