"""The user's environment: flags inside variables, unsafe settings, and variables that TensorFlow does not read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

XLA, TF_XLA = "XLA_FLAGS", "TF_XLA_FLAGS"

CacheUse = Literal["written", "shared", "loaded"]
"""A folder of compilations takes those of one process, of all processes of a search, or is only read."""

_FAST_MATH = "fast-math gives up not-a-number and infinity, by which a training that diverges is noticed"
REFUSED: Mapping[str, str] = {
    "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT": "cuDNN's persistent batch normalisation may overflow",
    "xla_gpu_enable_fast_min_max": _FAST_MATH,
    "xla_cpu_enable_fast_math": _FAST_MATH,
    "xla_gpu_autotune_level": "below 4, XLA does not check the results of the kernels that it chooses",
}
"""Settings that make a training faster and less sure: variables, and flags of XLA."""
_UNSAFE = {"xla_gpu_autotune_level": ("0", "1", "2", "3")}

NOT_READ = (
    "TF_ENABLE_CUBLAS_TENSOR_OP_MATH_FP32",
    "TF_ENABLE_CUDNN_TENSOR_OP_MATH_FP32",
    "TF_ENABLE_CUDNN_RNN_TENSOR_OP_MATH_FP32",
    "TF_DISABLE_CUBLAS_TENSOR_OP_MATH",
    "TF_DISABLE_CUDNN_TENSOR_OP_MATH",
    "TF_DISABLE_CUDNN_RNN_TENSOR_OP_MATH",
)
"""Variables that guides recommend, and that no library of TensorFlow 2.21 contains."""

_WRITTEN, _READ = "xla_gpu_dump_autotune_results_to", "xla_gpu_load_autotune_results_from"
_PROGRAMS, _READ_ONLY = "tf_xla_persistent_cache_directory", "tf_xla_persistent_cache_read_only"
_CACHES = {XLA: ("xla_gpu_per_fusion_autotune_cache_dir", _WRITTEN, _READ), TF_XLA: (_PROGRAMS, _READ_ONLY)}
"""Flags by which one process reuses what another has compiled or autotuned."""
NO_CACHES = {XLA: f"--{_WRITTEN}= --{_READ}=", TF_XLA: f"--{_PROGRAMS}= --{_READ_ONLY}=false"}
"""The flags by which compilations are carried, naming no file: a TensorFlow that accepts them has them."""
_QUOTES = (('"', r'["\\]'), ("'", "'"))  # of a flag's value, and what each cannot hold
_AUTOTUNED = "autotuned.txt"  # in a folder of compilations; XLA writes text to a name that ends so


def parse_flags(variables: Mapping[str, str], variable: str) -> dict[str, str]:
    """Return the flags in a variable by name, as they are written: `{"xla_dump_to": "--xla_dump_to=/tmp"}`."""
    # As XLA parses it (xla/parse_flags_from_env.cc): flags, or the path of a file with flags.
    text = variables.get(variable, "").strip()
    if text and not text.startswith("-"):
        try:
            text = Path(text).read_text(encoding="utf-8", errors="replace") if Path(text).is_file() else ""  # no pipe
        except (OSError, ValueError):
            text = ""
    written = re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", text)
    return {flag.partition("=")[0].lstrip("-"): flag for flag in written}


def flag_value(variables: Mapping[str, str], variable: str, flag: str) -> str | None:
    """Return the text of a flag, `true` for a bare one; None where it is not set."""
    written = parse_flags(variables, variable).get(flag)
    if written is None:
        return None
    _, equals, text = written.partition("=")
    return text.strip("\"'").lower() if equals else "true"


def set_flag(variables: MutableMapping[str, str], variable: str, flag: str, text: str) -> None:
    """Set one flag, and leave the others as they are."""
    variables[variable] = " ".join({**parse_flags(variables, variable), flag: f"--{flag}={text}"}.values())


def without_caches(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name a cache of compilations, without it: each process must autotune for itself."""
    changed = {}
    for variable, caches in _CACHES.items():
        flags = parse_flags(variables, variable)
        if flags.keys() & set(caches):
            changed[variable] = " ".join(text for flag, text in flags.items() if flag not in caches)
    return changed


def caches_in(folder: str, variables: Mapping[str, str], use: CacheUse = "written") -> dict[str, str]:
    """Return the variables that name caches, changed so that XLA uses this folder.

    Without a folder, or with one that no flag can name, no cache is named: each process must autotune for itself. A
    shared folder takes whole programs alone: XLA writes its autotuning results to one file, which others may read.
    """
    changed = without_caches(variables)
    if folder and _quoted(folder):
        kept = {**variables, **changed}
        autotuned = os.path.join(folder, _AUTOTUNED)
        if use == "written" or (use == "loaded" and os.path.exists(autotuned)):
            set_flag(kept, XLA, _WRITTEN if use == "written" else _READ, _quoted(autotuned))
        set_flag(kept, TF_XLA, _PROGRAMS, _quoted(folder))
        if use == "loaded":
            set_flag(kept, TF_XLA, _READ_ONLY, "true")
        changed = {name: kept[name] for name in (XLA, TF_XLA) if kept.get(name) != variables.get(name)}
    return changed


def loading_from(folder: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change so that XLA loads what a folder holds. A cache of the user's own stays."""
    if not _quoted(folder):
        return {}
    changed, named = dict(variables), without_caches(variables)
    autotuned = os.path.join(folder, _AUTOTUNED)
    if XLA not in named and os.path.exists(autotuned):
        set_flag(changed, XLA, _READ, _quoted(autotuned))
    if TF_XLA not in named:
        set_flag(changed, TF_XLA, _PROGRAMS, _quoted(folder))
    return {name: text for name, text in changed.items() if variables.get(name) != text}


def _quoted(path: str) -> str:
    """Return a path as the value of a flag; empty where XLA's quotes cannot hold it."""
    # Of the two kinds, only double quotes have escapes.
    if not re.search(r"""[\s'"]""", path):
        return path
    return next((f"{mark}{path}{mark}" for mark, held in _QUOTES if not re.search(held, path)), "")


def environment_notes(variables: Mapping[str, str], tensorflow: str) -> Iterator[str]:
    """Yield notices of the environment, a sentence each; `tensorflow` is its version."""
    for name, why in REFUSED.items():
        variable = name if name.startswith("TF_") else XLA
        text = variables.get(name, "").lower() if variable == name else flag_value(variables, XLA, name)
        if text in _UNSAFE.get(name, ("true", "1")):
            shown = f"{name}={text}" if variable == name else f"{variable} has --{name}={text}"
            yield f"{shown}: {why}; unset it for a safe training"
    for name in NOT_READ:
        if name in variables:
            yield f"{name} is set, but TensorFlow {tensorflow} no longer reads it"
    for variable in without_caches(variables):
        yield f"{variable} names a compilation cache: trials run without it, so that each process tunes for itself"


def variable_fields(variable: str, texts: Mapping[Any, str], default: Any, *, flag: str = "") -> dict[str, Any]:
    """Return the fields of a knob that is an environment variable, or one flag in it.

    `texts` has the text of each value; the knob has its default where nothing stands there.
    """

    def read(variables: Mapping[str, str]) -> Any:
        text = flag_value(variables, variable, flag) if flag else variables.get(variable, "").lower()
        known = (text, {"1": "true", "0": "false", "true": "1", "false": "0"}.get(text or ""))
        return next((value for value, written in texts.items() if written in known), default)

    def write(variables: MutableMapping[str, str], value: Any) -> None:
        text = texts.get(value)
        if flag and text is not None:
            set_flag(variables, variable, flag, text)
        elif text is not None:  # any other value stays out of the environment
            variables[variable] = text

    return {"variable": variable, "set": write, "read": read, "default": default}
