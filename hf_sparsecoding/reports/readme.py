"""Runs the examples of a Markdown file, so that what it shows is what they print.

An example is a python block under a line `<!-- example:NAME -->`. The examples of a file share one namespace, in
order.
"""

from __future__ import annotations

import contextlib
import io
import re


EXAMPLE = re.compile(r"<!-- example:(?P<name>\S+) -->\n```python\n(?P<code>.*?)```", re.S)


def examples(text: str) -> dict[str, str]:
    """The code of each example by name.

    Raises:
        ValueError: for a python block without a name, or a name used twice.
    """
    found = [(match["name"], match["code"]) for match in EXAMPLE.finditer(text)]
    if len(found) != text.count("```python\n"):
        raise ValueError("a python block has no line <!-- example:NAME --> above it")
    if len(dict(found)) < len(found):
        raise ValueError(f"an example's name is used twice: {', '.join(name for name, _ in found)}")
    return dict(found)


def run_examples(text: str, replace: dict[str, str]) -> dict[str, str]:
    """What each example prints, after replacing strings in its code (a Hub id by a local folder, say)."""
    namespace: dict = {"__name__": "readme"}
    printed = {}
    for name, code in examples(text).items():
        for old, new in replace.items():
            code = code.replace(old, new)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, f"<example {name}>", "exec"), namespace)
        printed[name] = output.getvalue().strip()
    return printed
