"""Build HTML from elements: text is always text, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

Child = Element | str | None


def element(tag: str, *children: Child, **attributes: str | None) -> Element:
    """Return an element; what is None is left out. `class_` is the attribute `class`, `data_label` is `data-label`."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    made, last = Element(tag, given), None
    for child in children:
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif child is not None and last is None:
            made.text = (made.text or "") + child
        elif child is not None and last is not None:
            last.tail = (last.tail or "") + child
    return made


def with_code(text: str) -> list[Child]:
    """Return text as children of an element: what stands in backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of them has no partner
        return [text]
    return [element("code", part) if index % 2 else part for index, part in enumerate(parts)]


def to_html(elements: Iterable[Element]) -> str:
    """Return the elements as HTML, with all text escaped."""
    text = "\n".join(tostring(made, encoding="unicode", method="html") for made in elements)
    return text.encode("utf-8", "backslashreplace").decode()
