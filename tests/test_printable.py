"""Text of others, made fit to be shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.data.errors import RecipeError
from autotune.data.printable import LONGEST_MESSAGE, first_line, one_line, plural, short, with_article


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größe × 2 → [red].py", "größe × 2 → [red].py"),
        ("a\nb\tc\rd", "a b c d"),
        ("10\u202f000\u00a0s", "10 000 s"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\u202efdp.exe", r"\u202efdp.exe"),
        ("\udcff.py", r"\udcff.py"),
        ("a\x85b\u2028c\x00", r"a\x85b\u2028c\x00"),
        ("\u200b", r"\u200b"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text, shown):
    assert one_line(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_becomes_one_printable_line(text):
    assert one_line(text).isprintable()
    assert one_line(one_line(text)) == one_line(text)


@given(st.text(st.sampled_from("a\x00\n"), max_size=50), st.integers(3, 20))
def test_long_text_loses_its_middle(text, longest):
    cut = one_line(text, longest=longest)
    assert len(cut) <= longest
    whole = one_line(text)
    if len(whole) <= longest:
        assert cut == whole
    else:
        assert "…" in cut
        assert cut[0] == whole[0]
        assert cut[-1] == whole[-1]


@pytest.mark.parametrize("value", [10**5000, "x" * 100, [["deep"]] * 50, None, 1.5, "a\nb"], ids=range(6))
def test_a_value_is_shown_in_short(value):
    assert 0 < len(short(value)) <= 60
    assert short(value).isprintable()


def test_a_value_so_deep_that_it_has_no_text_is_shown_too():
    value = []
    for _ in range(100_000):
        value = [value]
    assert short(value) == "too large to show"


def test_error_message_is_one_line_whatever_it_contains():
    error = RecipeError("my\n\x1b[2J.json: " + "x" * 5000 + ": bad", hint="try\nthis\u202e")
    assert error.message.startswith(r"my \x1b[2J.json: x")
    assert error.message.endswith("x: bad")
    assert len(error.message) == LONGEST_MESSAGE
    assert str(error).splitlines() == [error.message, r"try this\u202e"]


@pytest.mark.parametrize(("text", "first"), [("a\nb", "a"), ("\nb", ""), ("a", "a"), ("", "")])
def test_the_first_line_of_no_text_is_empty(text, first):
    assert first_line(text) == first


def test_nouns_have_their_article_and_number():
    assert [with_article(each) for each in ("int", "EagerTensor", "list")] == ["an int", "an EagerTensor", "a list"]
    assert [plural(each, "trial") for each in (0, 1, 2, 1000)] == ["0 trials", "1 trial", "2 trials", "1,000 trials"]
