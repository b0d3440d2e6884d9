"""Prints a replica's verdicts and effects as readable lines, one line for each, in order."""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from msgspec.inspect import type_info

from lockstep.coordinator.prefetch_slots import UNBOUNDED
from lockstep.coordinator.verdict import Verdict
from lockstep.ranks.protocol.answers import Admission, Dropped, Wait
from lockstep.ranks.protocol.effects import Effects
from lockstep.ranks.protocol.events import MissedTokens
from lockstep.ranks.protocol.orders import CopyTransfer, Need, ObjectTransfer
from lockstep.ranks.replica.operations.lent import NO_PAGE
from tests.kit.scenarios.language import Names

_BARE = ("request", "pool", "requests")


def pages_text(pages: Sequence[int]) -> str:
    """Return page numbers as text like `0-3,7`, which `language.pages_of` parses."""
    parts: list[list[int]] = []
    for page in pages:
        if parts and page == parts[-1][-1] + 1 and page - 1 != NO_PAGE:
            parts[-1].append(page)
        else:
            parts.append([page])
    return ",".join(
        "_" if p == [NO_PAGE] else f"{p[0]}-{p[-1]}" if p[1:] else f"{p[0]}" for p in parts
    )


class Writer:
    """Prints output lines, in which page keys and proposals have a scenario's readable names."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._time_ms = 1000
        """The time in milliseconds that the output showed most recently; at first, the start time of
        the clocks."""
        self._messages = 0

    def answer(self, answer: object) -> Iterator[str]:
        if isinstance(answer, Admission | Dropped):
            yield f"answer: {self._text(answer)}"
        elif isinstance(answer, Wait):
            yield f"answer: wait, {answer}"
        elif isinstance(answer, bool):
            yield f"answer: {'yes' if answer else 'no'}"
        elif answer is not None:
            yield f"answer: {answer}"

    def verdict(self, verdict: Verdict) -> Iterator[str]:
        start = f"verdict {verdict.round}:"
        changes = [self._text(each).removeprefix("watermark ") for each in verdict.watermarks]
        changes += [self._text(each) for each in verdict.prefetch_slots]
        if verdict.proposed is not None:
            changes.append(self._text(verdict.proposed))
        if verdict.time_ms != self._time_ms:
            self._time_ms = verdict.time_ms
            changes.append(f"time {verdict.time_ms} ms")
        if verdict.requests != self._messages:
            self._messages = verdict.requests
            changes.append(f"messages {verdict.requests}")
        for each in changes or ["nothing new"]:
            yield f"{start} {each}"

    def effects(self, effects: Effects) -> Iterator[str]:
        if effects.lost is not None:
            yield f"lost: {effects.lost}"
        for each in effects.expectations:
            yield f"expect: {self._text(each)}"
        for order in effects.orders:
            yield f"order: {self._text(order)}"
        for decision in effects.decisions:
            yield self._text(decision).replace(" ", ": ", 1)
        for name in effects.freed:
            yield f"freed: {name}"
        for number, event in enumerate(effects.events, effects.events_before):
            yield f"event {number}: {self._text(event)}"
        if effects.requests:
            yield f"messages: up to {effects.requests}"

    def _text(self, value: Any) -> str:
        """Return a named tuple or dataclass as text: its type's name and its non-empty fields."""
        match value:
            case CopyTransfer():
                copied = f"{pages_text(value.sources)} -> {pages_text(value.destinations)}"
                return f"{value.pool} {copied}{' sealed' if value.sealed else ''}"
            case ObjectTransfer():
                named = f"{pages_text(value.pages)} = {self._names.keys(value.keys)}"
                return f"{value.pool} {named}"
            case Need():
                span = "" if value.span is None else f" span {value.span}"
                held = f" held {pages_text(sorted(value.on_host))}" if value.on_host else ""
                keys = self._names.keys(value.keys)
                return f"{value.pool} from {value.first}{span}{held}: {keys}"
            case _:
                kind: Any = type_info(type(value))
                fields = [self._field(each.name, getattr(value, each.name)) for each in kind.fields]
                return (
                    f"{spaced(value.__class__.__name__)} {', '.join(filter(None, fields))}".strip()
                )

    def _field(self, name: str, value: Any) -> str:
        label = name.removesuffix("_s").replace("_", " ")
        match value:
            case None | False | () | b"" | "":
                return ""
            case MissedTokens():
                counts = value._asdict().items()
                parts = [f"{cause.replace('_', ' ')} {count}" for cause, count in counts if count]
                return f"{label} {', '.join(parts)}" if parts else ""
            case True:
                return label
            case Enum():
                return value.name.lower().replace("_", " ")
            case str():
                return value if name in _BARE else f"{label} {value}"
            case bytes() if name == "tokens":
                # Omit tokens, because the page keys on the same line identify them.
                return ""
            case bytes():
                return f"{label} {self._names.keys((value,))}"
            case int() | float():
                return self._number(name, label, value)
            case (bytes(), *_):
                return f"{label} {self._names.keys(value)}"
            case (int(), *_):
                return f"{label} {pages_text(value)}"
            case _:
                return "; ".join(map(self._text, value))

    def _number(self, name: str, label: str, value: float) -> str:
        if name == "operation":
            return f"op {value}"
        if name == "proposal":
            return self._names.proposals[int(value)]
        if value == UNBOUNDED:
            return ""
        return f"{label} {value:g} s" if name.endswith("_s") else f"{label} {value}"


def spaced(name: str) -> str:
    """Return the name of a type as lower-case words."""
    return "".join(f" {each.lower()}" if each.isupper() else each for each in name).strip()
