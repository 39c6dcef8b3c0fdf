"""What a run leaves behind when it fails: nothing of a wrong input's, everything of a full disk's."""

import pytest

from autotune.data.errors import BudgetError, RunDirectoryError, WorkloadError
from autotune.data.run_directory import STATES, RunDirectory, follow_latest


def fail_with(error, path, *, trials=0):
    """Enter a run directory, put trials into it, and fail."""

    def run():
        directory = RunDirectory(path)
        with directory.create_and_lock():
            (path / "run.json").write_text("{}")
            for number in range(trials):
                (directory.prepare_trial(number) / "result.json").write_text("{}")
            for name in STATES:  # a baseline that takes too long may be killed while it saves its state
                (directory.prepare_trial(0) / name).write_text("")
            raise error

    with pytest.raises(type(error)):
        run()


@pytest.mark.parametrize("error", [WorkloadError("wrong"), BudgetError("short")])
def test_a_wrong_input_leaves_nothing(tmp_path, error):
    fail_with(error, tmp_path / "results" / "digits" / "one", trials=1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_above_that_was_there_before_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    fail_with(WorkloadError("wrong"), tmp_path / "mine" / "one")
    assert (tmp_path / "mine").is_dir()
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_directory_that_was_there_before_is_emptied_again(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    fail_with(WorkloadError("wrong"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    RunDirectory(tmp_path).create()


def test_failed_script_leaves_its_log_and_the_error_names_it(tmp_path):
    """The directory can be used again, and the log is then the next failure's."""

    def run(printed):
        directory = RunDirectory(tmp_path / "one")
        with directory.create_and_lock():
            (directory.log_directory / "template-1.log").write_text(f"{printed}\n")
            (directory.prepare_trial(0) / "log.txt").write_text("")
            raise WorkloadError("train.py raised KeyError", hint="Mend it.", detail="line 3")

    for printed in ("epoch 1", "epoch 2"):
        with pytest.raises(WorkloadError) as caught:
            run(printed)
        (kept,) = (tmp_path / "one").iterdir()
        assert caught.value.hint == f"Its log is {kept}. Mend it."
        assert kept.read_text() == f"{printed}\ntrain.py raised KeyError\nMend it.\nline 3\n"


def test_another_run_and_a_file_are_no_place_for_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        RunDirectory(tmp_path / "run").create()
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.json"]
    with pytest.raises(RunDirectoryError, match=r"cannot write to .*run\.json/run: Not a directory"):
        RunDirectory(tmp_path / "run" / "run.json" / "run").create()


FOREIGN = ("note.txt", "staged_data/part-0", "trials/0001/model.keras", "logs/mine.log", "recipe.json.bak")


@pytest.mark.parametrize("there_before", [True, False])
def test_what_others_put_there_meanwhile_stays(tmp_path, there_before):
    if there_before:
        (tmp_path / "one").mkdir()

    def run():
        directory = RunDirectory(tmp_path / "one")
        with directory.create_and_lock():
            (directory.path / "run.json").write_text("{}")
            (directory.prepare_trial(0) / "result.json").write_text("{}")
            (directory.log_directory / "template-1.log").write_text("")
            for name in FOREIGN:
                (directory.path / name).parent.mkdir(exist_ok=True)
                (directory.path / name).write_text("theirs")
            raise WorkloadError("wrong")

    with pytest.raises(WorkloadError):
        run()
    left = {str(path.relative_to(tmp_path / "one")) for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert left == set(FOREIGN)


@pytest.mark.parametrize("name", ["study.db", "recipe.json", "trials/model.keras", "logs/template-1.log", ".lock"])
def test_a_directory_that_holds_files_of_those_names_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(RunDirectoryError) as caught, RunDirectory(tmp_path).create_and_lock():
        pass
    first = name.partition("/")[0]
    assert caught.value.message == f"{tmp_path} holds {first} already, where a run would write its own"
    assert caught.value.hint == "Give --out another directory."
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("error", [RunDirectoryError("full"), WorkloadError("changed")], ids=["full disk", "other"])
def test_what_was_tried_stays_whatever_fails_later(tmp_path, error):
    fail_with(error, tmp_path / "one", trials=3)
    assert len(list((tmp_path / "one" / "trials").iterdir())) == 3


def test_the_latest_link_leads_to_the_run_that_was_begun_last(tmp_path):
    first, second = (RunDirectory(tmp_path / "train" / f"2026112{day}-191001-1a2b3c") for day in (0, 1))
    for directory in (first, second):
        directory.create()
        directory.link_latest()
    latest = tmp_path / "train" / "latest"
    assert latest.resolve() == second.path
    assert [path.name for path in latest.parent.iterdir() if path.name.startswith(".")] == []
    first.link_latest()
    assert latest.resolve() == first.path
    for directory in (first, second):
        directory.release()


def test_follow_latest_resolves_only_a_link_to_a_run(tmp_path):
    run = tmp_path / "20261120-191001-1a2b3c"
    latest = tmp_path / "latest"
    latest.symlink_to(run.name)
    assert follow_latest(latest) == run
    latest.unlink()
    latest.symlink_to("/etc")
    assert follow_latest(latest) == latest
    assert follow_latest(run) == run


def test_a_new_run_beside_the_users_links_asks_for_another_place(tmp_path):
    (tmp_path / "mine").symlink_to("/etc/hostname")
    with pytest.raises(RunDirectoryError, match="is a link") as caught, RunDirectory(tmp_path).create_and_lock():
        pass
    assert caught.value.hint.startswith("Name another directory")
    assert (tmp_path / "mine").is_symlink()


def test_latest_link_spares_named_directories_and_user_files(tmp_path):
    RunDirectory(tmp_path / "mine").link_latest()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "latest").write_text("mine")
    RunDirectory(tmp_path / "20261120-191001-1a2b3c").link_latest()
    assert (tmp_path / "latest").read_text() == "mine"
