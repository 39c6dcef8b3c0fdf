"""The command line's application, which the commands join."""

from __future__ import annotations

from cyclopts import App

app = App(
    name="autotune",
    help="Finds the fastest stable way to run a TensorFlow training on this machine.",
    help_epilogue="With --debug, an error shows its traceback.",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    help_format="plaintext",
)
