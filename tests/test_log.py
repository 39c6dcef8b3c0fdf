"""Logs: cut when they grow too large, read at their ends, shown without what a terminal would obey."""

import os
import stat

import pytest
from test_runtime_noise import NOISE

from autotune.runtime.logs import (
    END_BYTES,
    HEAD_BYTES,
    LARGEST_LOG_BYTES,
    TAIL_LENGTH,
    cap_log,
    find_fatal_line,
    open_log,
    printable,
    read_tail,
)


@pytest.fixture
def log(tmp_path):
    """A log file, to be written."""
    return tmp_path / "log.txt"


def test_a_log_is_its_owners_alone_and_is_appended_to(log):
    for text in (b"one\n", b"two\n"):
        with open(open_log(log), "ab") as stream:
            stream.write(text)
    assert log.read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_link_in_a_logs_place_is_not_followed(log, tmp_path):
    log.symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        open_log(log)
    assert not (tmp_path / "mine").exists()


def test_a_log_of_noise_alone_has_no_tail(log):
    log.write_text("\n".join(NOISE) + "\n")
    assert read_tail(log) == ""
    assert log.read_text().splitlines() == NOISE


def test_the_tail_keeps_what_stands_between_noise(log):
    log.write_text("\n".join([*NOISE, "one", *NOISE, "  two", *NOISE * 5]))
    assert read_tail(log) == "one\n  two"


@pytest.mark.parametrize(
    "states",
    [
        [
            "\x1b[1m 1/20\x1b[0m \x1b[37m━━━━━━━━\x1b[0m \x1b[1m2s\x1b[0m 120ms/step - loss: 1.2",
            " 20/20 ━━━━━━━━ 1s 3ms/step",
        ],
        ["\r 1/20 [>......] - ETA: 1s - loss: 1.2", "\r20/20 [=======] - 1s 3ms/step"],
        ["\r  5%|▌         | 1/20 [00:01<00:19]", "\rEpoch 1: 100%|██████████| 20/20 [00:20<00:00]"],
    ],
    ids=["Keras 3", "Keras 2", "tqdm"],
)
def test_of_a_progress_bar_the_last_state_is_kept(log, states):
    log.write_text("\n".join(["Epoch 1/1", *states[:1] * 50, states[1], "3/4 of the data are used"]))
    assert read_tail(log).splitlines() == ["Epoch 1/1", states[1].strip("\r"), "3/4 of the data are used"]


def test_a_long_log_is_read_from_its_last_whole_line_on(log):
    log.write_bytes(NOISE[4].encode() + b"x" * 100 + b"\n" + b"y\n" * (END_BYTES // 2 - 1) + b"\xff\n")
    shown = read_tail(log)
    assert len(shown) == TAIL_LENGTH
    assert shown.endswith("y\n\N{REPLACEMENT CHARACTER}")
    log.write_text(NOISE[0] * (END_BYTES // len(NOISE[0]) + 1) + "\nlast")
    assert read_tail(log) == "last"


def test_a_missing_log_has_no_tail(tmp_path):
    assert read_tail(tmp_path / "none") == ""


def test_bytes_that_a_terminal_would_obey_are_not_shown(log):
    log.write_bytes(b"\x1b[31mred\x1b[0m\x00\x07\n 1/2\r 2/2\ttab\xff\x9b\n")
    assert read_tail(log) == "red\n 1/2\n 2/2\ttab\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_a_log_of_the_usual_size_is_left_alone(log):
    log.write_bytes(b"x" * LARGEST_LOG_BYTES)
    cap_log(log)
    assert log.stat().st_size == LARGEST_LOG_BYTES
    cap_log(log.parent / "none")
    assert not (log.parent / "none").exists()


def test_a_log_that_grew_too_large_loses_its_middle(log):
    log.write_bytes(b"first\n" + b"x" * LARGEST_LOG_BYTES + b"\nlast\n")
    cap_log(log)
    text = log.read_bytes()
    assert HEAD_BYTES < len(text) < 2 * HEAD_BYTES
    assert text.startswith(b"first\n")
    assert text.endswith(b"x\nlast\n")
    assert b"[autotune: cut out here; the log had grown to 16777228 bytes]" in text


def test_a_writer_goes_on_after_the_cut(log):
    writer = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(writer, b"x" * (LARGEST_LOG_BYTES + 1))
    cap_log(log)
    os.write(writer, b"more")
    os.close(writer)
    assert log.read_bytes().endswith(b"xmore")
    assert b"\x00" not in log.read_bytes()


@pytest.mark.parametrize(
    "line",
    [
        "F1120 22:24:39.123456   12345 debug_options_flags.cc:130] Unknown flag in XLA_FLAGS: --no_such",
        "F0000 00:00:1763670501.123456   12345 tensor.cc:100] Check failed: dims == 2",
        "2026-11-20 10:00:00.1: F tensorflow/core/framework/tensor.cc:852] 1 == NumElements()",
        "train.cc:7: Check failed: fine",
    ],
)
def test_the_line_by_which_the_runtime_aborts_is_found(log, line):
    log.write_text(f"F one of mine\n{line}\n" + "  File train.py, line 1\n" * 1000)
    assert find_fatal_line(log) == line
    log.write_text("Found nothing\nF1120\n")
    assert find_fatal_line(log) == ""


def test_what_is_no_text_can_be_written_all_the_same():
    text = printable("bad file \udcff\x1b[31m.jpg")
    assert text == "bad file \\udcff.jpg"
    assert text.encode()
