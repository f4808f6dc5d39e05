"""A line before and after, for somebody who reviews the change: pins, settings, patches.

Words from patches are escaped: they can steer neither a terminal nor a page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from overlay.lines.line import UPSTREAMS, Line, Upstream
from overlay.patches.rangediff import Change, Way, compare, difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# A job's summary on GitHub may have 1 MiB; beyond, all of it is thrown away.
_MAX_MARKDOWN = 900_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What changed in a line.

    Attributes:
        line: its name.
        status: ``changed``, ``same``, ``new`` or ``removed``.
        settings: key of ``line.toml``, value before and after; "" where there was none.
        changes: of each series, also those that are the same.
    """

    line: str
    status: str
    settings: tuple[tuple[str, str, str], ...]
    changes: Mapping[Upstream, tuple[Change, ...]]


def review(name: str, before: Line | None, after: Line | None) -> Review:
    """Compare a line with what it was; None stands for no such line."""
    changes = {
        upstream: compare(*(line.series[upstream] if line else () for line in (before, after)))
        for upstream in UPSTREAMS
    }
    settings = tuple(_settings(before, after))
    differs = settings or any(not change.is_same for each in changes.values() for change in each)
    status = "changed" if differs else "same"
    if before is None or after is None:
        status = "new" if before is None else "removed"
    return Review(line=name, status=status, settings=settings, changes=changes)


def _settings(before: Line | None, after: Line | None) -> Iterator[tuple[str, str, str]]:
    old, new = (
        dict(_flat(msgspec.to_builtins(line.settings), "")) if line else {}
        for line in (before, after)
    )
    for key in old | new:
        if old.get(key) != new.get(key):
            yield key, old.get(key, ""), new.get(key, "")


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield prefix + key, ", ".join(map(str, value))
        elif value is not None:
            yield prefix + key, _plain(str(value))


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _worth_showing(change: Change) -> bool:
    """Whether the lines that differ are worth a look; a new patch is read as a file."""
    return change.message or change.way in (Way.CONTEXT, Way.CONTENT)


def document(found: Review) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "status": found.status,
        "settings": [dict(zip(("key", "old", "new"), row, strict=True)) for row in found.settings],
        "upstreams": {
            upstream: [_change(change) for change in changes]
            for upstream, changes in found.changes.items()
        },
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "patch": change.name,
        "way": change.way,
        "was": change.old.name if change.renamed and change.old else None,
        "message": change.message,
        "reordered": change.reordered,
        "old_sha256": change.old.sha256 if change.old else None,
        "new_sha256": change.new.sha256 if change.new else None,
        "difference": difference(change) if _worth_showing(change) else [],
    }


def as_text(found: Review) -> tuple[list[tuple[str, ...]], str]:
    """Rows (what, upstream, name, notes), and the differences one below the other."""
    rows: list[tuple[str, ...]] = []
    if found.status in ("new", "removed"):
        rows.append((f"line is {found.status}", "", found.line, ""))
    for key, old, new in found.settings if found.status == "changed" else ():
        rows.append(("setting", "", key, f"{old or 'none'} -> {new or 'none'}"))
    parts = []
    for upstream, change in _shown(found):
        rows.append((str(change.way), upstream, change.name, ", ".join(change.notes)))
        if _worth_showing(change):
            parts.append(
                "\n".join([f"{upstream}/{change.name}: {change.way}", *difference(change)])
            )
    return rows, "\n\n".join(parts)


def _shown(found: Review) -> Iterator[tuple[Upstream, Change]]:
    for upstream, changes in found.changes.items():
        yield from ((upstream, change) for change in changes if not change.is_same)


def as_markdown(found: Review, old: str, new: str | None) -> str:
    """A section for a page; what would be too long for one is left out, and said so."""
    title = {"new": "is new", "removed": "is removed"}.get(found.status, "")
    revisions = f"{_code(old)} → {_code(new) if new else 'working copy'}"
    parts = [f"## Line {_code(found.line)} {title}".rstrip(), f"{revisions}. {_counts(found)}"]
    if found.settings and found.status == "changed":
        rows = [(_code(key), _code(a), _code(b)) for key, a, b in found.settings]
        parts.append(_table(("setting", "before", "after"), rows))
    patches = [
        (upstream, _code(change.name), change.way, _cell(", ".join(change.notes)), _subject(change))
        for upstream, change in _shown(found)
    ]
    if patches:
        parts.append(_table(("upstream", "patch", "what", "notes", "subject"), patches))
    size = sum(map(len, parts))
    left_out = 0
    for upstream, change in _shown(found):
        if not _worth_showing(change):
            continue
        lines = difference(change)
        text = "\n".join(lines)
        size += len(text.encode()) + 200
        if size > _MAX_MARKDOWN:
            left_out += 1
            continue
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        summary = f"<summary>{upstream} <code>{change.name}</code>: {change.way}</summary>"
        parts.append(f"<details>{summary}\n\n{fence}diff\n{text}\n{fence}\n\n</details>")
    if left_out:
        parts.append(f"{left_out} more differences are too long for this page.")
    return "\n\n".join(parts) + "\n"


def _counts(found: Review) -> str:
    counts = dict.fromkeys(Way, 0)
    for changes in found.changes.values():
        for change in changes:
            counts[change.way] += 1
    told = [f"{count} {way}" for way, count in counts.items() if count]
    return f"Patches: {', '.join(told)}." if told else "No patches."


def _subject(change: Change) -> str:
    patch = change.new or change.old
    return _cell(_plain(patch.subject)) if patch else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text that a page shows as it is: no markup, no mention of a person, no cell's end."""
    return re.sub(r"[^\w ,.:;()/+-]", lambda match: f"&#{ord(match[0])};", text)


def _code(text: str) -> str:
    """The same in a fixed width."""
    return f"<code>{_cell(_plain(text))}</code>" if text else ""
