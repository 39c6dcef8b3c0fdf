"""A run's time as a page: its points, its phases, and that it loads nothing."""

import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from simulated_runs import Watcher, faster_by, on_disk, simulated_trials, tune_simulated

from autotune import cli
from autotune.errors import RunDirectoryError
from autotune.record import Phase
from autotune.report.page import page
from autotune.report.timeline import Point, Span, Timeline, timelines
from autotune.tuning.progress import TrialBegan

BUDGET = 300.0
NASTY = "<script>alert(1)</script><a href='https://evil.test/'>click</a>\x1b[31m"


def burst(at):
    """Others take half of the machine for one second in seven."""
    return 0.5 if at % 7.0 < 1.0 else 0.0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run on a machine with bursts of load."""
    path = tmp_path_factory.mktemp("runs") / "one"
    trials = simulated_trials(faster_by(batch_size=2.0), noise=0.02, foreign_load=burst)
    with on_disk(path) as directory:
        tune_simulated(trials, directory, budget=BUDGET, soak=30.0)
    return path


def without_times(finished, path):
    """The same run, its slices without the time at which they ended."""
    for file in [finished / "run.json", *finished.glob("trials/*/result.json")]:
        text = re.sub(r'"at":\s*[0-9.e+-]+', '"at": null', file.read_text())
        target = path / file.relative_to(finished)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return path


class Loads(HTMLParser):
    """What a browser would fetch for a page, and the page's title."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.tags, self.title = [], [], ""
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note what it is and what it points at."""
        self.tags.append(tag)
        self._in_title = tag == "title"
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_data(self, data):
        """Note the title."""
        if self._in_title:
            self.title += data

    def handle_endtag(self, tag):
        """The title is over."""
        self._in_title = False


def drawn_in(text):
    """The traces and the layout that a page hands to plotly."""
    call = text[text.rindex("Plotly.newPlot(") :]
    decoder = json.JSONDecoder()
    traces, ends = decoder.raw_decode(call, call.index("[{"))
    layout, _ = decoder.raw_decode(call, call.index("{", ends))
    return traces, layout


def phases_of(timeline):
    """The phases, each as often as it came, seen to follow each other without a gap."""
    ends = [span.ends for span in timeline.phases]
    assert [span.begins for span in timeline.phases[1:]] == ends[:-1]
    assert all(span.begins < span.ends for span in timeline.phases)
    return [span.phase for span in timeline.phases]


def test_a_run_has_a_timeline(finished):
    """The baseline's slices once each, the pairs of all trials, phases one after another, all within the run."""
    (timeline,) = timelines(finished)
    times = [point.at for point in timeline.reference]
    assert times == sorted(set(times))
    assert 0 < times[0] < times[-1] < BUDGET
    phases = phases_of(timeline)
    assert phases[:3] == [Phase.BASELINE, Phase.SEARCH, Phase.CONFIRM]
    assert phases[-1] is Phase.SOAK
    for point in timeline.ratios:
        (around,) = [span for span in timeline.phases if span.begins < point.at <= span.ends]
        assert around.phase is point.phase


def test_a_search_that_goes_on_after_a_claim_is_a_stretch_of_its_own(tmp_path):
    """What is tried once something is confirmed is search again."""

    def speed(configuration):
        return 6000.0 if configuration["batch_size"] == 128 else 4000.0

    space = """
        schema_version = 1
        [knobs.batch_size]
        kind = "categorical"
        choices = [16, 32, 64, 128, 256, 512]
        [knobs.steps_per_execution]
        kind = "categorical"
        choices = [1, 2, 4, 8]
        """
    watcher = Watcher()
    trials = simulated_trials(speed, noise=0.01)
    with on_disk(tmp_path / "run") as directory:
        tune_simulated(trials, directory, space=space, budget=900.0, observe=watcher)
    order = [each.phase for each in watcher.of(TrialBegan) if each.phase in (Phase.SEARCH, Phase.CONFIRM)]
    changes = [phase for phase, _ in itertools.groupby(order)]
    assert changes.count(Phase.SEARCH) > 1, "the case is another one: no search after a claim"
    (timeline,) = timelines(tmp_path / "run")
    assert phases_of(timeline)[1:] == changes


def test_trials_that_had_no_memory_beside_the_baseline_are_there(tmp_path):
    """Their first process ran out of memory, and all that was measured is of a second one."""
    trials = simulated_trials(
        faster_by(jit_compile=2.0), noise=0.02, fits_together=lambda alive: len(alive) < 2
    )
    with on_disk(tmp_path / "run") as directory:
        tune_simulated(trials, directory, budget=300.0)
    (timeline,) = timelines(tmp_path / "run")
    assert phases_of(timeline)[:3] == [Phase.BASELINE, Phase.SEARCH, Phase.CONFIRM]
    assert {Phase.SEARCH, Phase.CONFIRM} <= {point.phase for point in timeline.ratios}


def test_the_references_speed_and_the_ratios_are_what_was_measured(finished):
    """4,000 samples a second where nobody disturbs it; pairs of larger batches have twice that."""
    (timeline,) = timelines(finished)
    quiet = [point.value for point in timeline.reference if point.load == 0]
    assert len(quiet) > 20
    assert all(3600 < value < 4400 for value in quiet)
    faster = [
        point.value for point in timeline.ratios if "batch_size" in point.configuration and point.load == 0
    ]
    assert len(faster) > 20
    assert all(1.7 < value < 2.3 for value in faster)
    assert any(point.disturbed and point.load > 0.4 for point in timeline.ratios)


def test_the_page_loads_nothing_and_has_every_point(finished):
    """One file, the drawing library in it; each slice and pair is a mark with trial and configuration beside it."""
    drawn = timelines(finished)
    text = page(drawn)
    loads = Loads(text)
    assert loads.fetched == []
    assert not {"link", "iframe", "img", "object", "base"} & set(loads.tags)
    assert loads.title == "Speed over time: simulated one"
    traces, layout = drawn_in(text)
    (timeline,) = drawn
    for axis, points in ((("x", "y"), timeline.reference), (("x2", "y2"), timeline.ratios)):
        mine = [trace for trace in traces if (trace["xaxis"], trace["yaxis"]) == axis]
        shown = sorted(
            (at, value) for trace in mine for at, value in zip(trace["x"], trace["y"], strict=True)
        )
        assert shown == sorted((point.at, point.value) for point in points)
        disturbed = [point for point in points if point.disturbed]
        crosses = [trace for trace in mine if trace["marker"]["symbol"] == "x"]
        assert sum(len(trace["x"]) for trace in crosses) == len(disturbed) > 0
        assert all("trial " in hover for trace in mine for hover in trace["text"])
    assert layout["xaxis2"]["title"]["text"] == "seconds since the run began"
    assert layout["yaxis"]["title"]["text"] == "samples/s"
    assert layout["yaxis2"]["title"]["text"] == "times the reference"
    names = {each["text"] for each in layout["annotations"]}
    assert {"baseline", "search", "confirmation", "watch"} <= names


def point_of(**fields):
    """A point, with a configuration that would like to be a page."""
    usual = {
        "at": 1.0,
        "value": 4000.0,
        "trial": 7,
        "phase": Phase.SEARCH,
        "configuration": NASTY,
        "load": 0.25,
        "disturbed": False,
    }
    return Point(**{**usual, **fields})


def test_others_text_is_shown_as_text():
    """Names and configurations that hold markup add no tag, no link and no control character."""
    harmless = Timeline(run="a", workload=None, reference=(), ratios=(), phases=())
    nasty = Timeline(
        run=NASTY,
        workload=NASTY,
        reference=(point_of(),),
        ratios=(point_of(value=1.5, disturbed=True),),
        phases=(Span(phase=Phase.SEARCH, begins=0.0, ends=2.0),),
    )
    text = page([nasty])
    assert Loads(text).tags == Loads(page([harmless])).tags
    assert "<script>alert" not in text
    assert "\x1b" not in text
    traces, layout = drawn_in(text)
    hovers = [hover for trace in traces for hover in trace["text"]]
    assert any("others took 25% of the machine" in hover for hover in hovers)
    for shown in [*hovers, *(each["text"] for each in layout["annotations"])]:
        assert "<" not in shown.replace("<br>", ""), "plotly draws links and other tags"


def test_several_runs_have_a_panel_each(finished):
    """Two panels for each, each pair with a time of its own; the legend names a mark once."""
    (timeline,) = timelines(finished)
    traces, layout = drawn_in(page([timeline, timeline]))
    assert {trace["xaxis"] for trace in traces} == {"x", "x2", "x3", "x4"}
    assert (layout["xaxis2"]["matches"], layout["xaxis4"]["matches"]) == ("x", "x3")
    named = [trace["name"] for trace in traces if trace["showlegend"]]
    assert len(named) == len(set(named))


def test_a_run_without_times_is_refused_in_a_line(finished, tmp_path, capsys):
    """It can be listed; asked for its plot, the command says why there is none."""
    older = without_times(finished, tmp_path / "older")
    with pytest.raises(
        RunDirectoryError, match="nothing can be plotted: no slice tells when it was measured"
    ):
        timelines(older)
    assert cli.main(["history", str(older)]) == 0
    capsys.readouterr()
    assert cli.main(["history", str(older), "--plot", str(tmp_path / "page.html")]) == 2
    assert "nothing can be plotted" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_the_command_writes_the_page(finished, tmp_path, capsys):
    """`history RUN --plot FILE` writes it, says so on standard error, and prints no table."""
    file = tmp_path / "page.html"
    assert cli.main(["history", str(finished), "--plot", str(file)]) == 0
    assert capsys.readouterr() == ("", f"1 run plotted in {file}\n")
    assert Loads(file.read_text()).title == "Speed over time: simulated one"
