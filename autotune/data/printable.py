"""Make text of other people fit to print and share: on one line, not too long, without control characters.

Credentials are kept out of everything that is written: arguments, environment variables, text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence

LONGEST_MESSAGE = 1000  # characters


def one_line(value: object, *, longest: int | None = None) -> str:
    r"""Return `value` as one line, cut in its middle to `longest` characters: `"a\nb\x1b[0m"` becomes `a b\x1b[0m`."""
    text = _without_middle(str(value), longest)  # it may have millions of characters
    return _without_middle("".join(map(_shown, text)), longest)


def short(value: object) -> str:
    """Return a value from a file in at most 60 characters, for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of 5,000 digits, tables 1,000 deep
        text = "too large to show"
    return text if len(text) <= 60 else text[:57] + "…"


def with_article(noun: str) -> str:
    """Return `an int` for `int`, and `a list` for `list`."""
    begins = noun.lower()
    is_vowel = begins.startswith(tuple("aeiou")) and not begins.startswith(("one", "uni", "use", "eu"))
    return f"{'an' if is_vowel else 'a'} {noun}"


def plural(count: int, noun: str) -> str:
    """Return `1 trial`, `2 trials` or `2 processes`, with separators from a thousand on."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def time_in_words(seconds: float) -> str:
    """Return a length of time in a unit that suits it: `0.3 s`, `45 s`, `12 min`, `3.4 hours`."""
    if seconds < 119.5:
        return f"{seconds:.1g} s" if 0 < seconds < 0.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7170 else f"{seconds / 3600:,.1f} hours"


def rate_text(value: float) -> str:
    """Return a number of something per second: `12,345`, or `2.4` if it is small."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def memory_size(count: int | None) -> str:
    """Return bytes for people: `607 MiB`; a dash where they are not known."""
    if count is None:
        return "–"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return seconds as on a clock: `1:05`."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def first_line(text: str) -> str:
    """Return the first line of a text; empty if there is none."""
    return next(iter(text.splitlines()), "")


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    if char in "\n\r\t" or unicodedata.category(char) == "Zs":
        return " "
    return char.encode("unicode_escape").decode()


def _without_middle(text: str, longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    left = longest // 2
    return f"{text[:left]}…{text[len(text) - (longest - left - 1) :]}"


_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return `text` without control sequences, in UTF-8; each state of a progress bar is a line."""
    return _UNPRINTABLE.sub("", text.replace("\r", "\n")).encode("utf-8", "backslashreplace").decode()


# --------------------------------------------------------------------------------------------------------- credentials


MASK = "***"
RECORDED_PREFIXES = (
    *("TF_", "XLA_", "KERAS_", "CUDA_", "CUDNN_", "NVIDIA_", "NCCL_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_"),
    *("NUMEXPR_", "ONEDNN_", "DNNL_", "MALLOC_", "AUTOTUNE_"),
)
"""Variables of these names act on speed, and are recorded with their values."""
SHORTEST_VALUE = 6  # characters; a shorter one is not looked for in text, where it may be part of any word

_NAME = re.compile(
    r"(?:^|_)(?:(?:token|secret|passwords?|passwd|passphrase|pwd|credentials?|apikey|authorization|auth|cookie|bearer)"
    r"|(?:api|access|secret|private|encryption|signing|license|account|client|session|ssh|auth|wandb|hf)_?key(?:_id)?"
    r"|(?:db|user|sql|smtp|ftp|http)_?pass)$"
)
_NO_CREDENTIAL = re.compile(r"(?:pad|eos|bos|unk|mask|cls|sep|start|end|oov|special|stop|image|new|num|max|min)_token$")
_URL_USER = re.compile(  # a password may hold what should be escaped: the host follows the last @
    r"(\w[\w+.-]*://)(?:([^/\s:@]*):(?!\d{1,5}(?:[/?#]|$))\S+?|[^/\s:@]{16,})@(?=[\w.\[\]-]+(?::\d+)?(?:[/?#\s\"']|$))"
)
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}")
_NAME_OF_VALUE = re.compile(r"""([A-Za-z][\w.-]*)["']?\s*[=:]\s*["']?""")
_VALUE = re.compile(r"""[^\s"'&,;}\]]+""")
_KNOWN_SHAPES = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{20,}|sk-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|(?<=hooks\.slack\.com/)services/\S+"
)


def is_credential(name: str) -> bool:
    """Return whether a name, such as `--hf-token` or `AWS_SECRET_ACCESS_KEY`, is that of a credential."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    name = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    return _NAME.search(name) is not None and _NO_CREDENTIAL.search(name) is None


def mask_text(text: str, values: Collection[str] = ()) -> str:
    """Return `text` with these values, and what looks like a credential, replaced by `MASK`."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    text = _URL_USER.sub(lambda url: f"{url[1]}{url[2] + ':' if url[2] is not None else ''}{MASK}@", text)
    text = _KNOWN_SHAPES.sub(MASK, _SCHEME.sub(rf"\1 {MASK}", text))
    parts, done = [], 0
    for name in _NAME_OF_VALUE.finditer(text):
        if is_credential(name[1]) and (found := _VALUE.match(text, name.end())):
            parts += [text[done : name.end()], MASK]
            done = found.end()
    return "".join([*parts, text[done:]])


def mask_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a script's arguments with `MASK` instead of credentials."""
    masked: list[str] = []
    is_value = False  # of the option before it
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if is_value and not argument.startswith("--"):
            masked.append(MASK)
            is_value = False
            continue
        is_value = not equals and argument.startswith("-") and is_credential(argument)
        if equals and value and re.fullmatch(r"[\w.+~-]+", name) and is_credential(name):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask_text(argument))
    return tuple(masked)


def masked_names(arguments: Sequence[str]) -> list[str]:
    """Return the text before each masked value, for a message."""
    found = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if MASK in argument:
            found.append(argument.partition("=")[0] if "=" in argument else before if argument == MASK else argument)
    return found


def credential_values(arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the credentials themselves, as far as they are long enough to be found in text."""
    found = [
        argument.removeprefix(masked.partition(MASK)[0]).removesuffix(masked.rpartition(MASK)[2])
        for argument, masked in zip(arguments, mask_arguments(arguments), strict=True)
        if argument != masked
    ]
    found += [value for name, value in variables.items() if is_credential(name)]
    return tuple(value for value in found if len(value) >= SHORTEST_VALUE)


def recorded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables as they are recorded: values only of those that act on speed."""
    return {
        name: mask_text(value) if name.startswith(RECORDED_PREFIXES) and not is_credential(name) else MASK
        for name, value in variables.items()
    }
