"""HTML that is safe by construction: whatever is not `Markup` already is escaped when it is put into a tag."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from specmodel.report_page.redact import without_secrets

__all__ = ["Child", "Markup", "embedded_json", "finite", "fragment", "shown", "tag", "text"]

_VOID = frozenset({"br", "input", "link", "meta", "wbr"})
_KEPT = frozenset("\xa0\n")


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


Child = str | float | None | Iterable["Child"]


def shown(value: str) -> str:
    """What may be shown of a text: no secrets, and written out what is no visible character, or turns the writing."""
    return "".join(
        c if c.isprintable() or c in _KEPT else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in without_secrets(value)
    )


def text(value: str | float) -> Markup:
    """Escape a value; what is `Markup` stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(shown(f"{value:g}" if isinstance(value, float) else str(value))))


def fragment(*children: Child) -> Markup:
    """Join children, each escaped unless it is `Markup`; None is nothing."""
    out = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str | int | float):
            out.append(text(child))
        else:
            out.append(fragment(*child))
    return Markup("".join(out))


def tag(name: str, /, *children: Child, **attributes: Any) -> Markup:
    """Write an element.

    Parameters
    ----------
    name : str
        Of the element.
    *children
        Text, numbers, `Markup` or any nesting of them.
    **attributes
        An underscore at the end is left out, others are hyphens (``class_``, ``aria_label``); ``viewBox`` keeps its
        case. None and False leave the attribute out, True writes it bare.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        words.append(attribute if value is True else f'{attribute}="{text(_short(value))}"')
    opened = f"<{' '.join(words)}>"
    return Markup(opened) if name in _VOID else Markup(f"{opened}{fragment(*children)}</{name}>")


def _short(value: Any) -> Any:
    return f"{round(value, 2):g}" if isinstance(value, float) else value


def finite(value: Any) -> Any:
    """Return the same plain values for a JSON document: what is not finite is None, and texts hold no secrets."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {without_secrets(str(key)): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def embedded_json(document: Any) -> Markup:
    """Write plain values as JSON that cannot end the script element it stands in, nor begin a comment there."""
    dumped = json.dumps(finite(document), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for character in "<>&":
        dumped = dumped.replace(character, f"\\u{ord(character):04x}")
    return Markup(dumped)
