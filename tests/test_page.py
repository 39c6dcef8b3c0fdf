"""A run's page in a real browser: what it shows, that it works, and that it loads nothing."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulated_runs import BASELINE, faster_by, on_disk, simulated_trials, space, tune_simulated

from autotune.data.facts import GpuUse
from autotune.data.figures import Bottleneck, Ceilings, Operation, Profile
from autotune.data.printable import memory_size
from autotune.data.record import Outcome
from autotune.data.run_directory import RunDirectory
from autotune.front import cli
from autotune.front.tune import tune
from autotune.recipe.answer import NOT_PROMISED
from autotune.recipe.recipe import Recipe
from autotune.report.charts import element, to_html, with_code
from autotune.report.history import compare, load_history
from autotune.report.page import LONGEST_LOG, page_data, write_page
from autotune.space.configuration import Configuration, read_trials

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
SPACE = space(batch_size=(16, 256), steps_per_execution=[1, 4, 16])


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
    return displayed(with_script(page, script), tmp_path, *flags)


def opened_in_frame(page: Path, tmp_path: Path, script: str, width: int, *flags: str) -> tuple[str, str]:
    """The same on a screen of this width: windows of the browser are never as narrow as a phone."""
    told = "document.getElementById('told')"
    text = with_script(page, f"{script}parent.document.body.append({told});")
    frame = f'<!doctype html><body><iframe width="{width}" height="900" srcdoc="{html.escape(text)}"></iframe></body>'
    return displayed(frame, tmp_path, "--window-size=1400,1000", *flags)


def with_script(page: Path, script: str) -> str:
    """A page with a script at its end."""
    return page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")


def displayed(text: str, tmp_path: Path, *flags: str) -> tuple[str, str]:
    """A document once the browser has drawn it, and what the browser logged."""
    shown = tmp_path / "shown.html"
    shown.write_text(text, encoding="utf-8")
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
        " document.querySelectorAll('.spot.now, .spot.chosen').length,"
        " performance.getEntriesByType('resource').map((each) => each.name), document.title]"
    )
    document, log = opened(run / "report.html", tmp_path, script)
    headings, marked, requests, title = answer_of(document)
    assert headings == [
        "Losses over the time of the training",
        "From ×1 to the answer",
        "The search space",
        "All trials",
        "Before and after",
        "Where time goes",
        "Machine and versions",
    ]
    assert marked >= 2, "of each knob the value now"
    assert requests == []
    assert "taken" not in title
    assert "CONSOLE" not in log


@needs_browser
def test_the_table_sorts_and_filters(run, tmp_path):
    script = """
      const texts = (nodes) => [...nodes].map((each) => each.textContent);
      const column = (index) => texts(document.querySelectorAll(`#trial-rows tr:not([hidden]) td:nth-child(${index})`));
      const click = (index) => document.querySelectorAll("#trial-table th button")[index].click();
      const seen = {};
      click(3); seen.down = column(4);
      click(3); seen.up = column(4);
      document.getElementById("outcome").value = "oom";
      document.getElementById("outcome").dispatchEvent(new Event("change"));
      seen.oom = column(3);
      document.getElementById("outcome").value = "";
      document.getElementById("filter").value = "batch_size=256";
      document.getElementById("filter").dispatchEvent(new Event("input"));
      seen.filtered = texts(document.querySelectorAll("#trial-rows tr:not([hidden])"));
      seen.count = document.getElementById("count").textContent;
    """
    document, _ = opened(run / "report.html", tmp_path, script + tell("seen"))
    seen = answer_of(document)

    def numbers(texts):
        return [float(text.removeprefix("×")) for text in texts if text != "–"]

    assert numbers(seen["down"]) == sorted(numbers(seen["down"]), reverse=True)
    assert numbers(seen["up"]) == sorted(numbers(seen["up"]))
    assert len(numbers(seen["up"])) > 2
    assert seen["oom"] == ["oom"]
    assert seen["filtered"]
    assert all("batch_size=256" in each for each in seen["filtered"])
    assert seen["count"].startswith(f"{len(seen['filtered'])} of ")


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_its_first_screen_is_a_picture_in_both_themes(learnt, tmp_path, width, theme):
    script = tell(
        "[innerWidth, document.documentElement.scrollWidth <= innerWidth,"
        " matchMedia('(prefers-color-scheme: dark)').matches,"
        " getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor,"
        " ['loss-chart', 'waterfall-chart'].map((name) => document.getElementById(name).getBoundingClientRect())]"
    )
    flags = ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    document, _ = opened_in_frame(learnt / "report.html", tmp_path, script, width, *flags)
    seen, fits, dark, text, behind, (losses, steps) = answer_of(document)
    assert (seen, fits) == (width, True)
    assert dark is (theme == "dark")
    brightness = [sum(map(int, re.findall(r"\d+", each)[:3])) for each in (text, behind)]
    assert abs(brightness[0] - brightness[1]) > 400
    assert losses["top"] < 900
    if width == 1280:
        assert losses["bottom"] < 900
        assert steps["left"] > losses["right"], "beside it"
    else:
        assert steps["top"] > losses["bottom"], "below it"


@needs_browser
def test_it_can_be_used_by_keyboard(learnt, tmp_path):
    script = """
      const chart = document.getElementById("loss-chart"), said = [];
      const press = (key) => {
        chart.dispatchEvent(new KeyboardEvent("keydown", { key }));
        said.push(document.getElementById("tip").textContent);
      };
      chart.focus();
      press("ArrowRight"); press("ArrowRight"); press("ArrowLeft");
      const heads = [...document.querySelectorAll("#trial-table th button")].map((each) => each.tabIndex);
    """
    script += tell("[said, heads, chart.tabIndex, document.activeElement === chart]")
    document, _ = opened(learnt / "report.html", tmp_path, script)
    (first, second, again), heads, *reached = answer_of(document)
    assert first.startswith("as it is, after ")
    assert second.startswith("as it is, after ")
    assert first == again != second
    assert set(heads) == {0}
    assert reached == [0, True]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A whole run that has compared how a larger batch learns."""
    trials = simulated_trials(lambda each: 8000.0 if each.batch_size > 32 else 4000.0, noise=0.02, critical_batch=1e6)
    with on_disk(tmp_path_factory.mktemp("learnt") / "run") as directory:
        tune_simulated(trials, directory, space=SPACE, budget=400.0, objective="time_to_loss")
    write_page(directory.path)
    return directory.path


def test_page_shows_both_answers_and_losses_of_both_batches(learnt):
    data, recipe = page_data(RunDirectory(learnt)), Recipe.load(learnt / "recipe.json")
    assert recipe.answer.recommended == "larger batch"
    assert [data.losses["curves"][place]["kind"] for place in (0, -1)] == ["baseline", "other"]
    assert data.losses["gap"]["text"] == f"{recipe.learning_rate_rule.same_loss.speedup.shown()} sooner"


@needs_browser
def test_the_losses_are_drawn_with_their_spread_axes_and_legend(learnt, tmp_path):
    script = tell(
        "[[...document.querySelectorAll('.answers dt')].map((each) => each.textContent),"
        " document.querySelector('.caveat').textContent,"
        " ['path', 'polyline'].map((name) => document.querySelectorAll(`#loss-chart ${name}`).length),"
        " document.getElementById('loss-chart').textContent,"
        " document.querySelector('#losses ~ .keys').textContent]"
    )
    document, log = opened(learnt / "report.html", tmp_path, script)
    headings, promised, (shapes, lines), labels, legend = answer_of(document)
    drawn = page_data(RunDirectory(learnt)).losses
    assert headings == ["Same training", "Larger batchrecommended"]
    assert "Not promised of the other batch size" in promised
    curves = drawn["curves"]
    assert (shapes, lines) == (len(curves) + 1, len(curves)), "bands, and the head of the gap's arrow"
    assert "time of the training" in labels
    assert "loss on a fixed probe" in labels
    assert drawn["gap"]["text"] in labels
    assert legend == "".join(curve["name"] for curve in curves)
    assert "CONSOLE" not in log


def test_what_others_wrote_stays_text(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 2
    assert "&lt;/script&gt;&lt;script&gt;" in page
    assert "<img" not in page
    logs = re.findall(r"<pre>(.*?)</pre>", page[page.index('id="trials"') :], re.DOTALL)
    assert max(len(html.unescape(log)) for log in logs) == LONGEST_LOG


def test_page_of_unfinished_or_damaged_run_lists_missing_parts(run, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    (cut / "recipe.json").unlink()
    write_page(cut)
    assert page_data(RunDirectory(cut)).missing == ["recipe: the run has not ended, or was cut off"]
    (cut / "trials" / "0001" / "result.json").write_text("{", encoding="utf-8")
    data = page_data(RunDirectory(cut))
    (missing, _) = data.missing
    assert missing.startswith(f"trials: {cut}/trials/0001/result.json is damaged")
    assert len(data.records) == len(page_data(RunDirectory(run)).records) - 1
    shutil.rmtree(cut / "trials")
    write_page(cut)
    assert page_data(RunDirectory(cut)).records == []


def test_the_page_holds_the_advice_and_the_ceilings(run):
    text = words(run)
    assert all(sentence in text for sentence in page_data(RunDirectory(run)).recipe.evidence.advice)
    assert re.search(r"the step alone, samples/s\s*1,080", text)
    assert "joules/sample" not in text
    assert len(page_data(RunDirectory(run)).sides) == 2


def test_what_stands_in_backticks_is_code():
    said = element("p", *with_code("Install it (`pip install <x>`), then `--soak 2m`."), *with_code(" a ` b"))
    code = "Install it (<code>pip install &lt;x&gt;</code>), then <code>--soak 2m</code>."
    assert to_html([said]) == f"<p>{code} a ` b</p>"


def test_the_page_shows_no_backticks(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<code>--soak 2m</code>" in page


def test_before_and_after_are_of_the_claim(run):
    evidence = Recipe.load(run / "recipe.json").evidence
    for throughput in (evidence.baseline_throughput, evidence.throughput):
        assert throughput.shown("", ",.0f") in words(run)


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


# ------------------------------------------------------------------------------------------------ its contents


def words(path):
    """The text of a run's page, written anew, as a reader without scripts has it."""
    page = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", write_page(path).read_text(encoding="utf-8"))
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_text_and_tables_need_no_script(learnt):
    text, recipe = words(learnt), Recipe.load(learnt / "recipe.json")
    same_loss = recipe.learning_rate_rule.same_loss.speedup
    assert f"×{same_loss.value:.2f}" in text
    assert "sooner to the same losses" in text
    assert NOT_PROMISED in text
    assert "autotune tune" in text or "recipe.fit(" in text
    for record in read_trials(RunDirectory(learnt)):
        assert Configuration(record.configuration).describe(BASELINE) in text


def test_a_page_without_profiles_says_once_how_to_take_them(learnt):
    assert words(learnt).count("No profile was taken.") == 1
    assert "--profile finalists" in words(learnt)


@pytest.fixture(scope="module")
def undecided(tmp_path_factory):
    """A run whose time was too short."""
    trials = simulated_trials(faster_by(batch_size=1.3), noise=0.1)
    with on_disk(tmp_path_factory.mktemp("undecided") / "run") as directory:
        recipe = tune_simulated(trials, directory, space=SPACE, budget=25.0)
    assert recipe.evidence.verdict == "undecided"
    assert recipe.candidate is not None
    return directory.path


def test_page_of_undecided_run_shows_candidate_and_next_command(undecided):
    text, recipe = words(undecided), Recipe.load(undecided / "recipe.json")
    assert "Undecided" in text
    assert f"Best candidate: {Configuration(recipe.candidate.configuration).describe(BASELINE)}" in text
    assert f"--resume {undecided} --budget" in text


def test_an_unfinished_run_shows_the_command_that_goes_on(undecided, tmp_path):
    cut = shutil.copytree(undecided, tmp_path / "cut")
    (cut / "recipe.json").unlink()
    assert f"--resume {cut}" in words(cut)


def test_energy_and_telemetry_are_shown_where_there_are_figures(undecided, tmp_path):
    names = ("joules/sample", "power", "highest GPU temperature", "GPU clock, of the highest")
    assert not [name for name in names if name in words(undecided)]
    directory = RunDirectory(shutil.copytree(undecided, tmp_path / "run"))
    first = next(read_trials(directory))
    card = GpuUse(joules=200.0, celsius=51, sm_mhz=1500, most_sm_mhz=2000)
    slices = tuple(timed.model_copy(update={"gpus": (card,)}) for timed in first.slices)
    directory.write_trial(first.model_copy(update={"slices": slices}))
    assert [name for name in names if name in words(directory.path)] == list(names)
    assert "75%" in words(directory.path)


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """A run that has left changes out of its recommendation."""
    trials = simulated_trials(faster_by(batch_size=1.5, steps_per_execution=1.4), noise=0.02)
    with on_disk(tmp_path_factory.mktemp("explained") / "run") as directory:
        tune_simulated(trials, directory, space=SPACE, budget=600.0, keeps_budget=False)
    write_page(directory.path)
    return directory.path


@needs_browser
def test_the_waterfall_has_a_bar_for_each_change_and_one_for_all(explained, tmp_path):
    steps = page_data(RunDirectory(explained)).waterfall
    assert {step.name.split("=")[0] for step in steps} >= {"batch_size", "steps_per_execution"}
    script = tell(
        "[document.querySelectorAll('#waterfall-chart rect').length,"
        " document.getElementById('waterfall-chart').textContent, document.querySelector('#changes').textContent]"
    )
    document, log = opened(explained / "report.html", tmp_path, script)
    bars, labels, heading = answer_of(document)
    assert bars == len(steps) + 1
    assert all(step.name in labels for step in steps)
    assert heading == "From ×1 to the answer"
    assert "CONSOLE" not in log


@needs_browser
@pytest.mark.parametrize("page", ["run", "learnt", "explained"])
def test_on_a_phone_labels_can_be_read_and_rows_are_cards(page, tmp_path, request):
    script = tell(
        "[innerWidth, document.documentElement.scrollWidth,"
        " [...document.querySelectorAll('svg text')].map((each) => each.getBoundingClientRect())"
        "   .filter((box) => box.height < 11 || box.left < -1 || box.right > innerWidth + 1).length,"
        " getComputedStyle(document.querySelector('#trial-rows tr')).display]"
    )
    path = request.getfixturevalue(page) / "report.html"
    document, _ = opened_in_frame(path, tmp_path, script, 390)
    width, taken, unreadable, display = answer_of(document)
    assert width == 390
    assert taken <= width
    assert unreadable == 0
    assert display == "block"


@needs_browser
def test_a_thousand_trials_are_drawn(run, tmp_path):
    directory = RunDirectory(shutil.copytree(run, tmp_path / "run"))
    known = next(record for record in read_trials(directory) if record.speedup is not None)
    for number in range(100, 1100):
        directory.prepare_trial(number)
        directory.write_trial(known.model_copy(update={"trial": number, "ended_at_seconds": float(number)}))
    script = tell("document.querySelectorAll('#trial-rows tr').length")
    document, log = opened(write_page(directory.path), tmp_path, script)
    assert answer_of(document) >= 1000
    assert "CONSOLE" not in log


RECORDED = Path(__file__).parent.parent / "results" / "recorded"


@needs_browser
@pytest.mark.parametrize("name", ["cpu/two_cores/train_digits_command_one", "gpu/h200/resnet50"])
def test_one_run_has_one_answer_on_every_surface(name, tmp_path, capsys):
    path = Path(shutil.copytree(RECORDED / name, tmp_path / "r"))
    recipe = Recipe.load(path / "recipe.json")
    answer, rate = recipe.answer, recipe.evidence.baseline_throughput
    page, _ = opened(write_page(path), tmp_path, tell("document.body.textContent"))
    assert cli.main(["show", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert cli.main(["show", str(path)]) == 0
    terminal = " ".join(capsys.readouterr().out.split())
    row, frame = compare(path).iloc[0], load_history(path)
    surfaces = {"page": answer_of(page), "terminal": terminal, "print": " ".join(repr(recipe).split())}
    surfaces["notebook"] = html.unescape(recipe._repr_html_())
    for surface, text in surfaces.items():
        shown = 3 if surface == "terminal" else None  # the page has the rest
        said = [part for choice in answer.choices for part in choice.said[:shown]]
        assert [part for part in (answer.headline, answer.diagnosis, *said) if part not in text] == [], surface
    for surface in ("page", "terminal"):
        memory = memory_size(recipe.evidence.baseline_peak_memory_bytes.host)
        assert rate.shown("", ",.0f") in surfaces[surface]
        assert surface == "terminal" or memory in surfaces[surface]
    assert document["answer"]["headline"] == row["headline"] == answer.headline
    assert document["answer"]["baseline"]["throughput"] == rate.model_dump()
    assert (row["claim"], row["low"], row["high"]) == tuple(answer.speedup.model_dump().values())
    assert row["baseline_throughput"] == rate.value
    (recommended,) = frame[frame.recommended.fillna(False)].itertuples()
    assert (recommended.answer, recommended.headline) == (answer.recommended, answer.headline)
    (baseline,) = frame[frame.answer == "baseline"].itertuples()
    assert baseline.throughput == rate.value
    assert not frame[frame.answer.notna()].duplicate.any()
