"""The command line, without TensorFlow: answers, exit codes, what they say."""

import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_recommendation import run_that_is

from autotune.data.errors import ArgumentError
from autotune.data.facts import Gpu
from autotune.data.figures import Interval
from autotune.data.options import OPTIONS, Options
from autotune.front import cli
from autotune.front.cli import app
from autotune.machine.gpu import GpuReading
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import ClaimResult, EndedBy, Verdict
from autotune.tuning.events import RunBegan
from autotune.tuning.verify import Verification

ROOT = Path(__file__).resolve().parent.parent
COMMANDS_PAGE = ROOT / "docs" / "reference.md"
EXAMPLE = ROOT / "examples" / "digits_mlp.py"


A_GPU = Gpu(name="NVIDIA H200", memory_bytes=150754820096, compute_capability="9.0")


def run(capsys, *arguments):
    """Exit code, standard output and standard error of one command."""
    code = cli.main([str(each) for each in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


WRONG = {
    "no command of that name": (["frob"], "frob"),
    "a missing workload": (["tune"], "WORKLOAD"),
    "a missing file": (["tune", "nowhere.py"], "nowhere.py: no such file"),
    "an unknown option": (["tune", EXAMPLE, "--bugdet", "3m"], "--bugdet"),
    "no cores at all": (["knobs", "--space", "quick", "--cores", "0"], 'Invalid value "0" for --cores'),
    "no examples at all": (["knobs", "--space", "quick", "--examples", "0"], 'Invalid value "0" for --examples'),
    "no batch": (["knobs", "--space", "quick", "--batch-size", "0"], 'Invalid value "0" for --batch-size'),
    "a batch beyond all": (
        ["knobs", "--space", "quick", "--batch-size", "9999999"],
        "--batch-size: batch_size cannot be",
    ),
    "an unknown search space": (["tune", EXAMPLE, "--space", "qick"], "Did you mean 'quick'?"),
    "a missing recipe": (["show", "nowhere.json"], "cannot read nowhere.json"),
    "a missing recipe to begin with": (["tune", EXAMPLE, "--begin-with", "nowhere.json"], "cannot read nowhere.json"),
    "a directory that is no run": (["show", ROOT / "docs"], "docs is not a run directory"),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda each: each.replace(" ", "-"))
def test_wrong_input_gives_one_clear_message_and_exit_code_2(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, expected = WRONG[case]
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert expected in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("nowhere_to_be_found.train", "no module 'nowhere_to_be_found.train'"),
        ("autotune.version:workload", "autotune.version: no 'workload' in it"),
    ],
)
def test_input_that_importing_finds_wrong_is_answered_alike(capsys, tmp_path, monkeypatch, workload, expected):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "tune", workload)
    assert code == 2
    assert expected in err
    assert "Traceback" not in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_command_never_imports_tensorflow(tmp_path):
    script = (
        "import sys; from autotune.front.cli import main\n"
        "for arguments in (['--help'], ['knobs'], ['knobs', '--space', 'quick'], ['tune', 'nowhere.py'],"
        " ['tune', 'nowhere.at.all'], ['tune', 'autotune.version'], ['show', 'nowhere.json']):\n"
        "    main(arguments)\n"
        "loaded = {'tensorflow', 'keras', 'pandas'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_docs_and_help_list_every_command_and_option(capsys):
    table = re.findall(r"^\| (`autotune .*?) \|", COMMANDS_PAGE.read_text().replace("\\|", "/"), re.MULTILINE)
    told = re.findall(r"`autotune (\w+)([^`]*)`", " ".join(table))
    _, out, _ = run(capsys, "--help")
    commands = {name for name in app if not name.startswith("-")}
    assert {name for name, _ in told} == commands
    for command in commands:
        assert re.search(rf"^│ {command} ", out, re.MULTILINE)
        _, own, _ = run(capsys, command, "--help")
        assert f"autotune {command}" in own
        exist = {f"--{each.name.replace('_', '-')}" for each in options_of(app[command].default_command)}
        assert {
            option
            for name, more in told
            if name == command
            for option in more.partition(" -- ")[0].split()
            if option[:2] == "--"
        } <= exist
        assert all(option in own for option in exist)


def options_of(command):
    """The parameters that are given by name; `args` is what follows `--`."""
    parameters = inspect.signature(command).parameters.values()
    return [each for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "args"]


def test_show_prints_the_trials_and_the_claim_of_a_run(capsys, finished):
    code, out, _ = run(capsys, "show", finished)
    recipe = json.loads((finished / "recipe.json").read_text())
    assert code == 0
    assert out.splitlines()[1].split() == ["no.", "phase", "speed-up", "samples/s", "changes"]
    assert "  0  baseline" in out
    assert f"×{recipe['evidence']['speedup']['value']:.2f}" in out
    assert "Faster" in out
    assert f'.load("{finished / "recipe.json"}")' in out
    assert "--resume" not in out
    _, of_recipe, _ = run(capsys, "show", finished / "recipe.json")
    assert of_recipe.strip().startswith("Faster: ×")


def test_history_writes_what_it_says(capsys, finished, tmp_path):
    import pandas as pd

    csv, parquet = tmp_path / "h.csv", tmp_path / "h.parquet"
    code, out, told = run(capsys, "show", finished, "--csv", csv, "--parquet", parquet)
    trials = len(list((finished / "trials").iterdir()))
    assert code == 0
    assert len(pd.read_csv(csv)) == len(pd.read_parquet(parquet)) == trials
    assert f"{trials} trials written to {csv}" in told
    assert out == ""


@pytest.mark.parametrize(("redirect", "before"), [(">", ""), (">>", "mine\n"), ("| cat >", "")])
def test_history_writes_to_standard_output(finished, tmp_path, redirect, before):
    (tmp_path / "h.csv").write_text("mine\n")
    command = f"{shlex.quote(sys.executable)} -m autotune show {shlex.quote(str(finished))} --csv /dev/fd/1"
    subprocess.run(
        f"{command} {redirect} h.csv", shell=True, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    written = (tmp_path / "h.csv").read_text()
    assert written.startswith(before)
    lines = written.removeprefix(before).splitlines()
    assert lines[0].startswith("run,trial,")
    assert len(lines) == 1 + len(list((finished / "trials").iterdir()))


def test_history_prints_a_line_for_each_trial(capsys, finished):
    code, out, _ = run(capsys, "show", finished, finished)
    trials = len(list((finished / "trials").iterdir()))
    assert code == 0
    assert out.splitlines()[0].startswith("run")
    assert len(out.splitlines()) == trials + 3
    assert [line for line in out.splitlines() if line.endswith(" ")] == []


def test_compare_cuts_and_folds_nothing_in_a_pipe(capsys, finished, tmp_path):
    paths = [shutil.copytree(finished, tmp_path / f"{'long' * 40}-{number}") for number in range(2)]
    for path in paths:
        record = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**record, "run": path.name}))
    code, out, _ = run(capsys, "compare", *paths)
    assert code == 0
    for path in paths:
        assert sum(path.name in line and "batch_size=" in line for line in out.splitlines()) == 1
    assert "…" not in out


def test_space_shows_the_choices_and_their_number(capsys):
    code, out, _ = run(capsys, "knobs", "--space", "quick", "--examples", 1437, "--cores", 64)
    assert code == 0
    assert re.search(r"batch_size +16 32 64 128 256 *\n", out)
    assert re.search(r"num_parallel_calls +0 2 4 8 16 32 64 128 256 *\n", out)
    choices = [line.split()[1:] for line in out.splitlines() if line.split()[:1] and line.split()[0] in KNOBS]
    number = math.prod(len(choice) for choice in choices if choice[0] != "omitted:")
    assert f"{number:,} configurations" in out


@pytest.mark.parametrize(
    ("here", "asked", "shown"),
    [
        ((), (), "omitted: does not exist on a cpu"),
        ((A_GPU,), (), "true false"),
        ((A_GPU,), ("--device", "cpu"), "omitted: does not exist on a cpu"),
        ((), ("--device", "gpu"), "true false"),
    ],
)
def test_space_shows_the_choices_of_this_machines_device(capsys, monkeypatch, here, asked, shown):
    monkeypatch.setattr("autotune.machine.gpu.read_gpus", lambda: GpuReading(gpus=here))
    code, out, _ = run(capsys, "knobs", "--space", "gpu", *asked)
    assert code == 0
    assert re.search(rf"tensor_float_32 +{shown} *\n", out)


@pytest.mark.parametrize("what", ["--help", "show {run}"])
@pytest.mark.parametrize("output", ["> /dev/full", "| true", ">&- 2>&- <&-"])
def test_output_that_cannot_be_written_ends_nothing(finished, what, output):
    told = shell(f"{COMMAND} {what.format(run=shlex.quote(str(finished)))} {output}; exit ${{PIPESTATUS[0]}}")
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.parametrize("output", ["2> /dev/full", "2>&-"])
def test_an_error_that_cannot_be_written_keeps_its_exit_code(output):
    assert shell(f"{COMMAND} show nowhere {output}; exit ${{PIPESTATUS[0]}}").returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_the_terminal_lacks_are_replaced(finished, encoding):
    told = shell(f"PYTHONIOENCODING={encoding} {COMMAND} show {shlex.quote(str(finished))}", encoding)
    assert told.returncode == 0
    assert re.search(rf"Faster: {'[?]' if encoding == 'ascii' else '×'}\d\.\d\d", told.stdout)
    assert shell(f"PYTHONIOENCODING={encoding} {COMMAND} show größe→", encoding).returncode == 2


COMMAND = f"{shlex.quote(sys.executable)} -m autotune"


def shell(command, encoding="utf-8"):
    """What a shell command left with and printed."""
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        encoding=encoding,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_an_internal_error_says_so_and_hides_its_traceback(capsys, monkeypatch):

    def broken():
        raise RuntimeError("broken")

    monkeypatch.setattr("autotune.front.results.show_knobs", broken)
    code, _, err = run(capsys, "knobs")
    assert code == 4
    assert "internal error: RuntimeError: broken" in err
    assert "Traceback" not in err
    code, _, err = run(capsys, "knobs", "--debug")
    assert code == 4
    assert 'raise RuntimeError("broken")' in err


def test_debug_traceback_keeps_the_exit_code_of_wrong_input(capsys, tmp_path):
    code, _, err = run(capsys, "show", tmp_path / "nowhere", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-2].startswith("autotune: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_an_interrupt_leaves_with_130(capsys, monkeypatch, number):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted():
        signal.raise_signal(number)

    monkeypatch.setattr("autotune.front.results.show_knobs", interrupted)
    code, _, err = run(capsys, "knobs")
    signal.signal(signal.SIGINT, before)
    assert code == 130
    assert err == "autotune: interrupted\n"


@pytest.mark.parametrize("place", ["run.json", "trials/0000/result.json"])
def test_show_names_the_file_whose_knob_does_not_exist(capsys, finished, tmp_path, place):
    path = shutil.copytree(finished, tmp_path / "run")
    document = json.loads((path / place).read_text())
    document["baseline" if place == "run.json" else "configuration"]["warp"] = 9
    (path / place).write_text(json.dumps(document))
    code, _, err = run(capsys, "show", path)
    assert code == (2 if place == "run.json" else 0)
    assert err.count(f"{path / place}: ") == 1
    assert "'warp'" in err


@pytest.fixture
def tune_gives(monkeypatch, tmp_path):
    """`tune_gives(verdict, **evidence)`: from now on a run ends with such a recipe; the run's directory."""

    def gives(verdict, **evidence):
        recipe, directory = run_that_is(verdict, tmp_path / "my run")

        def tune(workload, *, observe, **options):
            observe(RunBegan(directory=directory.path, workload="simulated", budget=18.0))
            return recipe.model_copy(update={"evidence": recipe.evidence.model_copy(update=evidence)})

        monkeypatch.setattr("autotune.front.tune.tune", tune)
        return directory.path

    return gives


@pytest.mark.parametrize(
    ("verdict", "ended_by", "expected"),
    [
        *((verdict, EndedBy.BUDGET, 0) for verdict in Verdict),
        (Verdict.FASTER, EndedBy.INTERRUPTED, 0),
        (Verdict.UNDECIDED, EndedBy.INTERRUPTED, 130),
        (Verdict.NO_SIGNIFICANT_GAIN, EndedBy.INTERRUPTED, 130),
    ],
)
def test_tune_exits_0_unless_interrupted_without_a_winner(capsys, tune_gives, verdict, ended_by, expected):
    path = tune_gives(verdict, ended_by=ended_by)
    code, out, err = run(capsys, "tune", "train.py", "--budget", "18s")
    assert code == expected
    assert f"Recipe: {path / 'recipe.json'}" in out
    assert err == ""


def test_a_second_ctrl_c_says_how_to_go_on(capsys, monkeypatch, tmp_path):

    def tune(workload, *, observe, **options):
        if workload == "my train.py":
            (tmp_path / "my run").mkdir()
            observe(RunBegan(directory=tmp_path / "my run", workload="simulated", budget=18.0))
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune.front.tune.tune", tune)
    code, _, err = run(capsys, "tune", "my train.py")
    assert code == 130
    assert err.splitlines()[-1].endswith(f"autotune tune 'my train.py' --resume '{tmp_path / 'my run'}'")
    code, _, err = run(capsys, "tune", "train.py")
    assert code == 130
    assert "--resume" not in err


CLAIMED, MEASURED = Interval(value=1.5, low=1.4, high=1.61), Interval(value=1.2, low=1.15, high=1.26)


@pytest.mark.parametrize("found", ClaimResult)
@pytest.mark.parametrize("measured", [MEASURED, None])
def test_verify_prints_its_finding_and_exits_0_if_claim_holds(capsys, monkeypatch, found, measured):
    given = []

    def verify(*arguments, **options):
        given.append((arguments, options))
        instances = 0 if measured is None else 6
        return Verification(finding=found, claimed=CLAIMED, measured=measured, instances=instances, reason="so it is")

    monkeypatch.setattr(
        "autotune.recipe.recipe.find_recipe", lambda path, *_, **__: SimpleNamespace(recipe=path, path=path)
    )
    monkeypatch.setattr("autotune.tuning.verify.verify", verify)
    options = ("--budget", "80s", "--seed", 3, "--memory-margin", 0.2)
    code, out, err = run(capsys, "verify", "recipe.json", "train.py", *options)
    assert code == (0 if found is ClaimResult.HOLDS else 1)
    assert err == ""
    assert f"{found}: so it is." in out.splitlines()
    assert "claimed   ×1.50 (1.40 to 1.61)" in out.splitlines()
    shown = "–" if measured is None else "×1.20 (1.15 to 1.26) from 6 fresh processes a side"
    assert f"measured  {shown}" in out.splitlines()
    ((arguments, settings),) = given
    assert arguments == (Path("recipe.json"), "train.py")
    assert (settings["budget"], settings["seed"], settings["memory_margin"]) == ("80s", 3, 0.2)


def test_the_help_of_verify_names_every_finding_and_exit_code(capsys):
    _, out, _ = run(capsys, "verify", "--help")
    told = " ".join(out.split())
    assert "holds (exit code 0)" in told
    assert "(exit code 1)" in told
    for found in ClaimResult:
        assert f" {found}" in told
    for code in (2, 3, 4, 130):
        assert re.search(rf" {code} \w", told[told.index("Other exit codes") :])


@pytest.mark.parametrize(
    ("command", "files"),
    [
        (("tune", EXAMPLE, "--budget", "60s", "--", "--debug", "--width", "512"), ["--debug", "--width", "512"]),
        (("tune", EXAMPLE, "--", "--", "x"), ["--", "x"]),
        (("tune", EXAMPLE, "--"), []),
        (("tune", EXAMPLE), None),
    ],
)
def test_what_follows_two_hyphens_is_the_files_own(capsys, tuned_with, command, files):
    code, _, err = run(capsys, *command)
    assert (code, tuned_with[0]["args"]) == (2, files)
    assert "Traceback" not in err


def test_other_commands_have_no_file_to_hand_arguments_to(capsys, tmp_path):
    code, _, err = run(capsys, "show", "--", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err


def test_tune_function_and_command_declare_the_same_options():
    from autotune import tune

    function, command = inspect.signature(tune).parameters, inspect.signature(app["tune"].default_command).parameters
    names = list(OPTIONS)
    assert [name for name in function if name in OPTIONS] == [name for name in command if name in OPTIONS] == names
    defaults = Options(budget=60.0)
    for name in names[1:]:
        assert function[name].default == command[name].default == getattr(defaults, name)
    documented = " ".join(inspect.getdoc(tune).split())
    assert all(f"{name}: {option.help}" in documented for name, option in OPTIONS.items())
    with pytest.raises(ArgumentError, match="bugdet: Unexpected keyword argument"):
        tune(EXAMPLE, bugdet="3m")


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        ("tune train.py --epochs 5", "autotune tune train.py -- --epochs 5"),
        ("tune train.py --epochs=5 --budget 2m", "autotune tune train.py --budget 2m -- --epochs=5"),
        ("tune train.py data.root=/d", "autotune tune train.py -- data.root=/d"),
        ("tune train.py --shift -1 --budget 2m", "autotune tune train.py --budget 2m -- --shift -1"),
        ("tune --epochs 5 train.py", "autotune tune train.py -- --epochs 5"),
        ("tune -m package.train --lr 1 -- --epochs 5", "autotune tune -m package.train -- --lr 1 --epochs 5"),
        ("verify recipe.json train.py --epochs 5", "autotune verify recipe.json train.py -- --epochs 5"),
    ],
)
def test_a_scripts_own_options_come_after_two_hyphens(capsys, given, advised):
    code, _, err = run(capsys, *given.split())
    assert code == 2
    assert f"Options of the script come after `--`: {advised}" in err


def test_help_is_wrapped_at_the_width_of_the_terminal_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "verify", "--help")
    assert "by less than claimed; gone: no gain is shown, and clearly less than claimed;" in out


def test_first_screen_of_tune_help_shows_everyday_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "tune", "--help")
    everyday, search = out.index("─ Everyday ─"), out.index("─ Search ─")
    assert out[:search].count("\n") <= 40
    options = "--budget", "--out", "--json", "--resume", "--fixed-batch", "--objective", "--max-batch"
    assert all(everyday < out.index(f"{option} ") < search for option in options)
    assert search < out.index("─ Several devices ─") < out.index("--seat-devices")
    assert "--no-" not in out


@pytest.mark.parametrize("given", ["tune --budget", "tune train.py --budget", "verify r.json train.py --seed"])
def test_option_without_its_value_is_not_passed_to_the_script(capsys, given):
    code, _, err = run(capsys, *given.split())
    assert code == 2
    assert f"{given.split()[-1]} requires an argument" in err
    assert "Options of the script" not in err


def test_the_help_lists_commands_in_the_order_of_use(capsys):
    _, out, _ = run(capsys, "--help")
    shown = re.findall(r"^│ (\w+) ", out, re.MULTILINE)
    assert shown[:5] == ["doctor", "demo", "tune", "run", "show"]
    assert sorted(shown) == sorted(name for name in app if not name.startswith("-"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_each_shell(capsys, tmp_path, shell, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, _ = run(capsys, "--install-completion", "--shell", shell, "--output", tmp_path / "completion")
    assert code == 0
    text = (tmp_path / "completion").read_text()
    assert all(word in text for word in ("tune", "compare", "same-training"))


def test_bash_completion_offers_commands_and_their_options(tmp_path):
    (tmp_path / "completion").write_text(app.generate_completion(shell="bash"))
    asks = "COMP_WORDS=({words}); COMP_CWORD={last}; COMP_LINE='{words}'; COMP_POINT={end}; {function}"
    function = re.search(r"complete .*-F (\S+)", (tmp_path / "completion").read_text())[1]

    def offered(words):
        asked = asks.format(words=words, last=len(words.split()) - 1, end=len(words), function=function)
        return shell(f"source {tmp_path / 'completion'}; {asked}; echo ${{COMPREPLY[@]}}").stdout.split()

    assert offered("autotune ver") == ["verify"]
    assert "--same-training" in offered("autotune run --s")


@pytest.fixture
def three_runs(finished, tmp_path, monkeypatch):
    """The newest of three runs below `results`, which is the current directory's."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("b", "a", "c")):
        path = shutil.copytree(finished, tmp_path / "results" / "simulated" / name)
        os.utime(path / "run.json", (1e9 - age, 1e9 - age))
    return Path("results/simulated/b")


def test_without_an_argument_all_runs_are_compared(capsys, three_runs):
    code, out, _ = run(capsys, "compare", "--json")
    assert code == 0
    assert len(json.loads(out)["runs"]) == 3


def test_recorded_runs_are_read_only_where_they_are_named(capsys, three_runs):
    recorded = three_runs.parents[1] / "recorded"
    for name in ("digits", "cpu/two_cores/mlp", "20261120-191001-1a2b3c"):
        shutil.copytree(three_runs, recorded / name)
    shutil.rmtree(three_runs.parent)
    assert f"the newest run is {recorded}/20261120-191001-1a2b3c\n" in run(capsys, "show")[2]
    counts = [len(json.loads(run(capsys, "compare", *given, "--json")[1])["runs"]) for given in ([], [recorded])]
    assert counts == [1, 3]


@pytest.mark.parametrize("command", ["show", "report"])
def test_without_an_argument_the_newest_run_is_taken(capsys, three_runs, command):
    code, out, err = run(capsys, command)
    assert code == 0
    assert err == f"the newest run is {three_runs}\n"
    assert str(three_runs) in out
    newer = three_runs.rename(three_runs.with_name("20261120-191001-1a2b3c"))
    newer.with_name("latest").symlink_to(newer.name)
    code, out, _ = run(capsys, command, newer.with_name("latest"))
    assert code == 0
    assert (str(newer) in out, "latest" in out) == (True, False), "commands name the run, and not what leads to it now"
    shutil.rmtree("results")
    code, _, err = run(capsys, command)
    assert code == 2
    assert "no run was given, and results/ in this directory holds none" in err
    assert run(capsys, "compare") == (code, "", err)


@pytest.fixture
def prepared(monkeypatch):
    """What `prepare_run` was called with."""
    calls = []

    def prepare_run(recipe, script, args, options):
        calls.append((script, args))
        return lambda: 0

    monkeypatch.setattr("autotune.script.long_run.prepare_run", prepare_run)
    return calls


def test_run_without_a_script_uses_the_tuned_script(capsys, finished, prepared):
    assert run(capsys, "run", finished / "recipe.json")[0] == 0
    assert run(capsys, "run", finished / "recipe.json", "--", "--epochs", "90")[0] == 0
    script = json.loads((finished / "run.json").read_text())["workload"]["reference"]
    assert prepared == [(script, []), (script, ["--epochs", "90"])]


def test_run_and_verify_take_the_recipe_of_a_run_directory(capsys, finished, prepared, tmp_path):
    (tmp_path / "latest").symlink_to(finished)
    for directory in (finished, tmp_path / "latest"):
        assert run(capsys, "run", directory)[0] == 0
    script = json.loads((finished / "run.json").read_text())["workload"]["reference"]
    assert prepared == [(script, [])] * 2
    _, _, err = run(capsys, "verify", tmp_path, EXAMPLE)
    assert f"{tmp_path} is neither a run nor a folder of recipes" in err


def test_run_names_the_missing_argument_if_script_is_unknown(capsys, finished, prepared, tmp_path):
    shutil.copy(finished / "recipe.json", tmp_path)
    code, _, err = run(capsys, "run", tmp_path / "recipe.json")
    assert code == 2
    assert "SCRIPT is missing: no run.json beside" in err
    assert prepared == []


def test_run_without_a_script_asks_for_credentials_again(capsys, finished, prepared, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    recipe = json.loads((path / "recipe.json").read_text())
    recipe["workload"]["args"] = ["--hf-token", "***"]
    (path / "recipe.json").write_text(json.dumps(recipe))
    code, _, err = run(capsys, "run", path / "recipe.json")
    assert code == 2
    assert "the recipe stores no credentials, but its script got some" in err
    assert run(capsys, "run", path / "recipe.json", "--", "--hf-token", "x")[0] == 0


def test_compare_writes_its_whole_table(capsys, finished, tmp_path):
    import pandas as pd

    from autotune.report.history import COLUMNS

    code, out, told = run(capsys, "compare", finished, "--csv", tmp_path / "c.csv", "--parquet", tmp_path / "c.parquet")
    assert (code, out) == (0, "")
    assert list(pd.read_csv(tmp_path / "c.csv").columns) == list(COLUMNS)
    assert list(pd.read_parquet(tmp_path / "c.parquet").columns) == list(COLUMNS)
    assert f"1 run written to {tmp_path / 'c.csv'}" in told


@pytest.fixture
def tuned_with(monkeypatch):
    """What the command `tune` hands over."""
    calls = []

    def tune(workload, **options):
        calls.append({"workload": str(workload), **options})
        raise ArgumentError("was called")

    monkeypatch.setattr("autotune.front.tune.tune", tune)
    return calls


def test_the_demo_tunes_a_copy_of_its_example_wherever_one_is(capsys, tuned_with, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run(capsys, "demo", "--budget", "1m")
    assert [(given["workload"], given["budget"]) for given in tuned_with] == [("train_shapes.py", "1m")] * 2
    assert Path("train_shapes.py").read_text() == (ROOT / "examples" / "train_shapes.py").read_text()
    Path("train_shapes.py").unlink()
    Path("train_shapes.py").symlink_to(tmp_path / "elsewhere.py")
    assert run(capsys, "demo")[0] == 2
    assert not Path("elsewhere.py").exists()
    Path("train_shapes.py").unlink()
    Path("train_shapes.py").write_text("mine")
    code, _, err = run(capsys, "demo")
    assert (code, len(tuned_with)) == (2, 2)
    assert "train_shapes.py is here already, and is not the demo's" in err
    assert Path("train_shapes.py").read_text() == "mine"
