"""How an input is changed into another: bytes, JSON documents and lines of TOML, each in its own way.

A fuzzer that changes bytes alone spends its time on broken JSON, which never gets beyond the parser. So most
changes keep the structure and change what stands in it, and some change bytes.
"""

from __future__ import annotations

import json
import random
import re

LONGEST_INPUT = 60_000
NASTY_TEXTS = (
    "",
    "\x1b[31m",
    "\x1b]0;title\x07",
    "[red]x[/red]",
    "[/nothing]",
    "a\nb\r\nc",
    "\u202ename.py",
    "\u2028",
    "\x85",
    "\x00",
    "\ud800",
    ":smile:",
    "=1+1",
    "../../etc/passwd",
    "LD_PRELOAD",
    "TF_ENABLE_ONEDNN_OPTS",
    "é" * 40,
    "x" * 5000,
    "0001-01-01T00:00:00+23:00",
    "9999-12-31T23:59:59-23:00",
    "2026-11-20T10:00:00",
    "NaN",
    "1e999",
)
NASTY_NUMBERS = (
    *(0, 1, -1, 2, 255, 256, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64),
    *(-(1 << 63), 10**30, 10**400, 10**4200),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e17, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
)
NASTY_BYTES = (
    *(
        b"\x00",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\x1b[2J",
        b"\xed\xa0\x80",
        b"\xe2\x80\xae",
        b"\\ud800",
        b"\n",
        b"\r",
    ),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"\\",
        b",",
        b":",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-",
        b"null",
        b"true",
    ),
    *(b"9" * 5000, b"[" * 3000, b'{"a":' * 1000, b"#", b"'''", b'"""', b".", b"=", b"1979-05-27T07:32:00Z"),
)
_TOKEN = re.compile(r'"[^"\n]*"|[A-Za-z_]+|[0-9]+|[^\sA-Za-z0-9_]')
_TOML_TOKENS = (
    *(
        '"memory"',
        '"cores"',
        '"4*cores"',
        '"examples/4"',
        '"min(1024, examples/4)"',
        '"max(cores, 2)"',
        "true",
    ),
    *(
        '"examples/0"',
        '"999999999*examples"',
        '"min()"',
        '"((((1))))"',
        '"1e9"',
        "nan",
        "inf",
        "-inf",
        "1e400",
    ),
    *(
        "0",
        "1",
        "-1",
        "256",
        "257",
        "1048576",
        "999999999",
        "9" * 4299,
        "9" * 5000,
        "0x1F",
        "1_000",
        "[]",
        "{}",
    ),
    *("[" * 2000, "{a=" * 1000, ".".join("a" * 3000), '"\\u202e\\u001b[31m"', '"[red]"', "1979-05-27", "'''"),
    *('"categorical"', '"integer"', '"power_of_two"', "low", "high", "step", "choices", "kind", "knobs"),
    *(
        "schema_version",
        "batch_size",
        "precision",
        "jit_compile",
        "prefetch",
        "onednn",
        "tensor_float_32",
        "=",
        ".",
    ),
    *(
        '"mixed_bfloat16"',
        '"float32"',
        '"auto"',
        '"autotune"',
        "false",
        "\x00",
        "\u2028",
        '"' + "x" * 300 + '"',
    ),
)


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """One place cut out, doubled, overwritten or added to."""
    start = rng.randint(0, len(data))
    end = min(len(data), start + rng.choice((0, 1, 1, 2, 4, 16, 64, 1024)))
    match rng.randrange(6):
        case 0:
            return data[:start] + data[end:]
        case 1:
            return data[:end] + data[start:]
        case 2:
            return data[:start] + rng.choice(NASTY_BYTES) + data[end:]
        case 3:
            return data[:start] + rng.choice(NASTY_BYTES) + data[start:]
        case 4:
            return data[:start]
        case _:
            return data[:start] + bytes(rng.randrange(256) for _ in range(start, end)) + data[end:]


def change_json(document: object, rng: random.Random) -> object:
    """The document with one value in it replaced, taken out, doubled or moved elsewhere."""
    places = list(_places(document))
    if not places:
        return _nasty(rng)
    holder, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1:
            other, name = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[name]))
        case 2 if isinstance(holder, dict):
            holder[rng.choice(NASTY_TEXTS)] = holder.pop(key)
        case 2:
            holder[key:key] = [holder[key]] * rng.choice((1, 2, 300))
        case 3:
            holder[key] = rng.choice(([], {}, [holder[key]], {"a": holder[key]}, [[]] * 300))
        case 4 if isinstance(holder[key], str):
            text = holder[key]
            at = rng.randint(0, len(text))
            holder[key] = text[:at] + rng.choice(NASTY_TEXTS) + text[at:]
        case 4 | 5 if type(holder[key]) in (int, float):
            holder[key] = rng.choice((holder[key] + 1, -holder[key], holder[key] * 2, str(holder[key])))
        case _:
            holder[key] = _nasty(rng)
    return document


def _places(document: object):
    """Every value of a document but the whole, as what holds it and its key there."""
    pending = [document]
    while pending:
        holder = pending.pop()
        keys = (
            range(len(holder))
            if isinstance(holder, list)
            else list(holder)
            if isinstance(holder, dict)
            else ()
        )
        for key in keys:
            yield holder, key
            pending.append(holder[key])


def _nasty(rng: random.Random) -> object:
    return rng.choice((rng.choice(NASTY_TEXTS), rng.choice(NASTY_NUMBERS), rng.choice((None, True, False))))


def change_json_text(data: bytes, rng: random.Random) -> bytes:
    """JSON text with one to four values changed; its bytes, where it is none, and now and then."""
    if rng.random() < 0.15:
        return change_bytes(data, rng)
    try:
        document = json.loads(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            document = change_json(document, rng)
        return json.dumps(document).encode()
    except (ValueError, RecursionError, OverflowError):
        return change_bytes(data, rng)


def change_toml(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """TOML with a line taken out, doubled, moved or taken from `other`, or one of its tokens replaced."""
    if rng.random() < 0.1:
        return change_bytes(data, rng)
    text = data.decode(errors="replace")
    if rng.random() < 0.6 and (tokens := list(_TOKEN.finditer(text))):
        token = rng.choice(tokens)
        return (text[: token.start()] + rng.choice(_TOML_TOKENS) + text[token.end() :]).encode()
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines))
        case 2:
            lines[at:at] = rng.choice(other.decode(errors="replace").split("\n[")).split("\n")
        case _:
            lines[at], lines[-1] = lines[-1], lines[at]
    return "\n".join(lines).encode()
