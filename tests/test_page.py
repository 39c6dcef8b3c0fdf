"""A run's page in a real browser: what it shows, that it works, and that it loads nothing."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulated_runs import faster_by, on_disk, simulated_trials, tune_simulated

from autotune.data.figures import Bottleneck, Ceilings, Operation, Profile
from autotune.data.record import Branch, Outcome
from autotune.data.run_directory import RunDirectory
from autotune.front.tune import tune
from autotune.recipe.recipe import Recipe
from autotune.report.page import LONGEST_LOG, page_data, write_page
from autotune.space.configuration import read_trials

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=4000"),
    *("--dump-dom", "--enable-logging=stderr"),
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="Chromium is not installed (Debian: chromium)"
)
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'>\u2028'\"&"
SPACE = """
schema_version = 1
[knobs.batch_size]
kind = "power_of_two"
low = 16
high = 256
[knobs.steps_per_execution]
kind = "categorical"
choices = [1, 4, 16]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run with profiles, and a trial that failed with a hostile log."""
    trials = simulated_trials(faster_by(batch_size=1.3), noise=0.03)
    with on_disk(tmp_path_factory.mktemp("page") / "run") as directory:
        tune_simulated(trials, directory, space=SPACE, budget=200.0)
    records = list(read_trials(directory))
    profile = Profile(
        steps=20,
        step_seconds=0.001,
        breakdown={"input": 2e-4, "compute": 7e-4, "other": 1e-4},
        operations=(Operation(name=HOSTILE, kind="MatMul", on="host", count=20, self_seconds=0.01, share=1.0),),
    )
    first = {
        "profile": profile,
        "bottleneck": Bottleneck(name="input", share=0.2, why="the step waits for input 20% of its time"),
        "ceilings": Ceilings(by_input=400.0, by_compute=1080.0),
    }
    directory.write_trial(records[0].model_copy(update=first))
    failed = {"outcome": Outcome.OOM, "reason": HOSTILE, "log_tail": HOSTILE * 100, "speedup": None}
    directory.write_trial(records[2].model_copy(update=failed))
    write_page(directory.path)
    return directory.path


def opened(page: Path, tmp_path: Path, script: str = "", *flags: str) -> tuple[str, str]:
    """The page's document once it is drawn and a script of the test's has run in it; and what the browser logged."""
    text = page.read_text(encoding="utf-8")
    shown = tmp_path / "shown.html"
    shown.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, shown.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return ended.stdout, ended.stderr


def answer_of(document: str) -> object:
    """What the test's script has left in the document."""
    return json.loads(re.search(r'<pre id="told">(.*?)</pre>', document, re.DOTALL)[1])


def tell(expression: str) -> str:
    """A script that leaves the value of an expression in the document."""
    return (
        "const told = document.createElement('pre'); told.id = 'told'; document.body.append(told);"
        f"told.textContent = JSON.stringify({expression});"
    )


@needs_browser
def test_it_is_drawn_without_errors_and_loads_nothing(run, tmp_path):
    script = tell(
        "[[...document.querySelectorAll('h2')].map((each) => each.textContent),"
        " document.querySelectorAll('#search-chart circle').length,"
        " document.querySelectorAll('#effects-chart circle').length,"
        " performance.getEntriesByType('resource').map((each) => each.name), document.title]"
    )
    document, log = opened(run / "report.html", tmp_path, script)
    headings, trials, effects, requests, title = answer_of(document)
    assert headings == [
        "Before and after",
        "The search",
        "What each knob did",
        "Where time goes",
        "All trials",
        "Machine and versions",
        "How it was measured",
    ]
    assert trials > 3
    assert effects > 0
    assert requests == []
    assert "taken" not in title
    assert "CONSOLE" not in log


@needs_browser
def test_the_table_sorts_and_filters(run, tmp_path):
    script = """
      const texts = (nodes) => [...nodes].map((each) => each.textContent);
      const column = (index) => texts(document.querySelectorAll(`#trial-rows td:nth-child(${index})`));
      const click = (index) => document.querySelectorAll("#trials ~ .wide th button")[index].click();
      const seen = {};
      click(3); seen.down = column(4);
      click(3); seen.up = column(4);
      document.getElementById("outcome").value = "oom";
      document.getElementById("outcome").dispatchEvent(new Event("change"));
      seen.oom = column(3);
      document.getElementById("outcome").value = "";
      document.getElementById("filter").value = "batch_size=256";
      document.getElementById("filter").dispatchEvent(new Event("input"));
      seen.filtered = texts(document.querySelectorAll("#trial-rows tr"));
    """
    document, _ = opened(run / "report.html", tmp_path, script + tell("seen"))
    seen = answer_of(document)

    def numbers(texts):
        return [float(each.removeprefix("×")) for each in texts if each != "–"]

    assert numbers(seen["down"]) == sorted(numbers(seen["down"]), reverse=True)
    assert numbers(seen["up"]) == sorted(numbers(seen["up"]))
    assert len(numbers(seen["up"])) > 2
    assert seen["oom"] == ["oom"]
    assert seen["filtered"]
    assert all("batch_size=256" in each for each in seen["filtered"])


@needs_browser
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (500, "dark")])
def test_it_fits_wide_and_narrow_windows_in_both_themes(run, tmp_path, width, theme):
    script = tell(
        "[document.documentElement.scrollWidth <= innerWidth,"
        " matchMedia('(prefers-color-scheme: dark)').matches,"
        " getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    flags = [f"--window-size={width},900"]
    if theme == "dark":
        flags.append("--blink-settings=preferredColorScheme=0")
    document, _ = opened(run / "report.html", tmp_path, script, *flags)
    fits, dark, text, behind = answer_of(document)
    assert fits
    assert dark is (theme == "dark")
    brightness = [sum(map(int, re.findall(r"\d+", each)[:3])) for each in (text, behind)]
    assert abs(brightness[0] - brightness[1]) > 400


@needs_browser
def test_it_can_be_used_by_keyboard(run, tmp_path):
    script = """
      const dot = document.querySelector("#search-chart circle");
      dot.focus();
      const heads = [...document.querySelectorAll("#trials ~ .wide th button")].map((each) => each.tabIndex);
    """
    document, _ = opened(
        run / "report.html", tmp_path, script + tell("[document.getElementById('tip').textContent, heads]")
    )
    said, heads = answer_of(document)
    assert said.startswith("trial ")
    assert set(heads) == {0}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A whole run that has compared how a larger batch learns."""
    trials = simulated_trials(faster_by(batch_size=2.0), noise=0.02, critical_batch=1e6)
    with on_disk(tmp_path_factory.mktemp("learnt") / "run") as directory:
        tune_simulated(trials, directory, space=SPACE, budget=400.0, objective="time_to_loss")
    write_page(directory.path)
    return directory.path


def test_the_page_holds_both_answers_and_the_losses_of_both_batch_sizes(learnt):
    data, recipe = page_data(RunDirectory(learnt)), Recipe.load(learnt / "recipe.json")
    assert data["answer"]["answers"] == recipe.answers
    assert dict(recipe.answers)["Recommended"] == "larger batch"
    chart = data["learning"]["charts"][-1]
    assert f"Batch {recipe.batch_size} beside 32" in chart["heading"]
    chosen = [curve for curve in chart["curves"] if curve["role"] == "chosen"]
    assert [len(curve["points"]) > 3 for curve in chosen] == [True]
    factor = recipe.learning_rate_rule.same_loss.examples_factor
    assert factor.shown() in chart["found"]


@needs_browser
def test_the_losses_are_drawn_with_their_spread_axes_and_legend(learnt, tmp_path):
    script = tell(
        "[[...document.querySelectorAll('.answers th')].map((each) => each.textContent),"
        " document.querySelector('#learning ~ p').textContent,"
        " ['path', 'polyline', 'circle'].map((name) => document.querySelectorAll(`#learning-chart-0 ${name}`).length),"
        " document.getElementById('learning-chart-0').textContent,"
        " document.querySelector('#learning ~ .keys').textContent]"
    )
    document, log = opened(learnt / "report.html", tmp_path, script)
    headings, promised, (bands, lines, dots), labels, legend = answer_of(document)
    curves = page_data(RunDirectory(learnt))["learning"]["charts"][0]["curves"]
    assert headings == ["Same training", "Larger batch", "", "Recommended"]
    assert "Not promised of the other batch size" in promised
    assert (bands, lines) == (2, 4)
    assert dots == sum(len(curve["points"]) for curve in curves if curve["role"] != "other")
    assert "examples trained since the branch" in labels
    assert "loss on a fixed probe" in labels
    assert legend == "".join(curve["name"] for curve in curves)
    assert "CONSOLE" not in log


@needs_browser
def test_losses_that_were_not_measured_are_said_with_the_reason(learnt, tmp_path):
    directory = RunDirectory(shutil.copytree(learnt, tmp_path / "run"))
    for record in read_trials(directory):
        if record.branch is not None:
            directory.write_trial(record.model_copy(update={"branch": Branch(not_measured=f"no loss {HOSTILE}")}))
    write_page(directory.path)
    script = tell("[document.querySelector('#learning ~ h3 + p').textContent, document.querySelectorAll('svg').length]")
    document, _ = opened(directory.path / "report.html", tmp_path, script)
    said, charts = answer_of(document)
    assert said.startswith("Not measured: no loss &lt;/script&gt;")
    assert charts == 2, "those of the search and of the knobs' effects"


def test_what_others_wrote_stays_text(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 1
    assert "<img" not in page
    (failed,) = [each for each in page_data(RunDirectory(run))["trials"] if each["outcome"] == "oom"]
    assert len(failed["log"]) == LONGEST_LOG


def test_an_unfinished_and_a_damaged_run_have_a_page_that_says_what_is_missing(run, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    (cut / "recipe.json").unlink()
    write_page(cut)
    assert page_data(RunDirectory(cut))["missing"] == ["recipe: the run has not ended, or was cut off"]
    (cut / "trials" / "0001" / "result.json").write_text("{", encoding="utf-8")
    data = page_data(RunDirectory(cut))
    (missing, _) = data["missing"]
    assert missing.startswith(f"trials: {cut}/trials/0001/result.json is damaged")
    assert len(data["trials"]) == len(page_data(RunDirectory(run))["trials"]) - 1
    shutil.rmtree(cut / "trials")
    write_page(cut)
    assert page_data(RunDirectory(cut))["trials"] == []


def test_the_page_holds_the_advice_and_the_ceilings(run):
    data = page_data(RunDirectory(run))
    assert "the pipeline alone reaches 400 samples/s" in data["advice"][0]
    assert data["sides"][0]["ceilings"]["by_compute"] == 1080.0
    assert len(data["sides"]) == 2
    assert data["answer"]["verdict"] == "faster"


def test_before_and_after_are_of_the_claim(run):
    evidence = Recipe.load(run / "recipe.json").evidence
    shown = [side["throughput"]["value"] for side in page_data(RunDirectory(run))["sides"]]
    assert shown == [evidence.baseline_throughput.value, evidence.throughput.value]


def test_the_page_is_written_once_the_tuning_has_ended(run, tmp_path, monkeypatch):
    ended = tmp_path / "ended"
    shutil.copytree(run, ended)
    (ended / "report.html").unlink()
    request = SimpleNamespace(directory=RunDirectory(ended))
    monkeypatch.setattr("autotune.front.tune.read_request", lambda workload, **given: request)
    monkeypatch.setattr("autotune.front.tune.run_tuning", lambda *given, **how: "the recipe")
    notices = []
    assert tune("train.py", observe=notices.append) == "the recipe"
    assert (ended / "report.html").is_file()
    assert notices == []
    (ended / "report.html").unlink()
    (ended / "report.html").mkdir()
    assert tune("train.py", observe=notices.append) == "the recipe"
    assert notices[0].text.startswith("report.html was not written: ")
