"""What a run leaves behind when it fails: nothing of a wrong input's, everything of a full disk's."""

import pytest

from autotune.errors import BudgetError, RunDirectoryError, WorkloadError
from autotune.run_directory import RunDirectory
from autotune.tuning.occupying import occupied


def fail_with(error, path, *, trials=0):
    """Enter a run directory, put trials into it, and fail."""

    def run():
        directory = RunDirectory(path)
        with occupied(directory):
            (path / "run.json").write_text("{}")
            for number in range(trials):
                (directory.prepare_trial(number) / "result.json").write_text("{}")
            raise error

    with pytest.raises(type(error)):
        run()


@pytest.mark.parametrize("error", [WorkloadError("wrong"), BudgetError("short")])
def test_a_wrong_input_leaves_nothing(tmp_path, error):
    """The directory, and the workload's own above it, are gone; the results stay."""
    fail_with(error, tmp_path / "results" / "digits" / "one", trials=1)
    assert list((tmp_path / "results").iterdir()) == []


def test_a_directory_above_that_was_there_before_stays(tmp_path):
    """Empty or not, it is the user's."""
    (tmp_path / "mine").mkdir()
    fail_with(WorkloadError("wrong"), tmp_path / "mine" / "one")
    assert (tmp_path / "mine").is_dir()
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_directory_that_was_there_before_is_emptied_again(tmp_path):
    """What the user had in it stays, and the next try is not told that it holds a run."""
    (tmp_path / "mine.txt").write_text("mine")
    fail_with(WorkloadError("wrong"), tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]
    RunDirectory(tmp_path).create()


def test_a_full_disk_leaves_what_was_finished(tmp_path):
    """Whatever could not be written, the trials before it are still there."""
    fail_with(RunDirectoryError("full"), tmp_path / "one", trials=3)
    assert len(list((tmp_path / "one" / "trials").iterdir())) == 3


def test_what_was_tried_stays_whatever_fails_later(tmp_path):
    """A workload that breaks in the confirmation does not take the search's trials with it."""
    fail_with(WorkloadError("changed"), tmp_path / "one", trials=3)
    assert len(list((tmp_path / "one" / "trials").iterdir())) == 3
