"""Set a pin in the text of ``line.toml``; every comment and all else stays where it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import tomlkit
from tomlkit.items import Table

from overlay.lines.line import LINE_FILE, PROJECTS, Pin, Upstream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def set_pin(text: str, upstream: Upstream, pin: Pin, asked: Mapping[str, str]) -> str:
    """``line.toml`` with another pin.

    Args:
        text: of a valid ``line.toml``.
        upstream: whose pin.
        pin: the new one.
        asked: specifier that the new vLLM asks for, by project; only those that the line replaces
            are looked at.
    """
    document = tomlkit.parse(text)
    _set(document[upstream], msgspec.to_builtins(pin))
    requirements: Any = document["requirements"]
    for project, specifier in asked.items():
        if project in requirements:
            _put(requirements[project], "upstream", specifier)
    if upstream == "flashinfer":
        # The line's own FlashInfer; read_line refuses any other
        _put(requirements[PROJECTS[upstream]], "line", f"=={pin.version}")
    return tomlkit.dumps(document)


def comments_on(text: str, versions: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Numbers and text of lines that speak of one of ``versions`` in words, not as a value."""
    wanted = re.compile("|".join(rf"(?<![\w.]){re.escape(v)}(?!\w|\.\w)" for v in versions))
    for at, line in enumerate(text.splitlines(), start=1):
        comment = re.search(r"(^|\s)#.*", line)
        words = comment[0] if comment else line if line.startswith("summary") else ""
        if wanted.search(words):
            yield at, line.strip()


def _set(table: Any, values: Mapping[str, Any]) -> None:
    """Give a table exactly these values; a new key comes where its like was, or at the end."""
    old = {key for key in table if not isinstance(table[key], Table)}
    new = {key: value for key, value in values.items() if value is not None}
    if "abbreviation" in new.keys() - old and "commit" in old - new.keys():
        _rename(table, "commit", "abbreviation")
    elif "commit" in new.keys() - old and "abbreviation" in old - new.keys():
        _rename(table, "abbreviation", "commit")
    for key in [key for key in table if key not in new]:
        table.remove(key)
    for key, value in new.items():
        if isinstance(value, dict):
            _set(table[key], value)
        else:
            _put(table, key, value)


def _rename(table: Any, old: str, new: str) -> None:
    """One key in another's place, so that it doesn't end up behind the sub-tables."""
    # It has no public name; the tests would show that it went
    table.value._replace(old, new, table[old])


def _put(table: Any, key: str, value: Any) -> None:
    """Set a value where it differs, with the comment behind it."""
    if key in table and table[key] == (list(value) if isinstance(value, tuple) else value):
        return
    item = tomlkit.item(list(value) if isinstance(value, tuple) else value)
    if key in table:
        item.trivia.comment_ws = table[key].trivia.comment_ws
        item.trivia.comment = table[key].trivia.comment
    table[key] = item


__all__ = ["LINE_FILE", "comments_on", "set_pin"]
