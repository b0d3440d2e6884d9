"""Which engines share pages: all that compute the same KV, or those that are configured alike.

An engine's options are proven, field by field, to leave KV the function that its description names
(`kv_description.py`): at any value, or where they are as the engine has them by default. An engine all
of whose options are proven shares with every other one of which that is true, whatever it is. One that
has others counts by all that it is configured with, and shares with its own kind.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, cast

from .canonical import Json, canonical
from .kv_description import KvDescription
from .proven_out import names_by_owner
from .releases import is_release

Reasons = Mapping[str, Mapping[str, str]]
"""Names, several to a line, and their reason, by the class or namespace that has them."""


class Share(StrEnum):
    """With whom an engine shares the pages of its model."""

    ALL = "all"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Options:
    """What an engine is configured with beside its model and its weights."""

    engine: str
    digest: str
    """Of all that is not proven to change no byte of KV."""
    unproven: tuple[str, ...]
    """The options, by their place, that are not proven to leave KV the function that it is."""


def kv_name(
    weights: str, description: KvDescription, options: Options, share: Share, log: logging.Logger
) -> str:
    """Return what the key of every page has for an engine's KV, and say in a line what that means."""
    own = f"{weights}/{options.engine} {options.digest}"
    unproven = (*description.unproven, *options.unproven)
    if share is Share.ENGINE:
        log.info("pages are shared with %s engines that are configured alike", options.engine)
        return own
    if unproven:
        log.info(
            "pages are shared with %s engines that are configured alike, and with no other engine:"
            " not proven to leave KV as others compute it: %s",
            options.engine,
            ", ".join(unproven),
        )
        return own
    log.info("pages are shared with every engine of the same model, weights, type and page size")
    return f"{weights}/{description.digest}"


def unproven_version(found: str, read_in: Sequence[str]) -> Iterator[str]:
    """Yield a version of an engine's that is of no release in which its options were read."""
    if not is_release(found, read_in):
        yield f"version {found}"


def unproven_fields(value: object, found: Json, where: str, by_default: Reasons) -> Iterator[str]:
    """Yield the places of what is neither on `by_default` nor as its class declares it there.

    `found` is what `canonical` has made of `value` without what is proven at any value. Objects of the
    classes that `by_default` names are looked into.
    """
    assert isinstance(found, list)
    owner, names = cast("str", found[1]), names_by_owner(by_default)
    for each in found[2:]:
        name, worth = cast("tuple[str, Json]", each)
        if isinstance(worth, list) and worth[:1] == ["object"] and worth[1] in by_default:
            yield from unproven_fields(getattr(value, name), worth, f"{where}.{name}", by_default)
        elif name == "(made of)" and worth == ["list"]:
            continue
        elif name not in names[owner] or not is_default(worth, _declared(type(value), name)):
            yield f"{where}.{name}"


def is_default(worth: Json, declared: object) -> bool:
    """Say whether what a field came out as is what an engine has by default.

    Where nothing is declared, what is off, nothing or empty is.
    """
    if declared is None and worth in (None, False, 0, "", ["list"], ["mapping"], ["set"]):
        return True
    return declared is not MISSING and worth == canonical(declared, "a default")


def _declared(kind: Any, name: str) -> object:
    # vLLM's classes are pydantic's, of which the fields of a dataclass do not tell defaults.
    found = getattr(kind, "__pydantic_fields__", {}).get(name)
    if found is not None:
        return MISSING if found.is_required() else found.get_default(call_default_factory=True)
    for each in fields(kind) if is_dataclass(kind) else ():
        if each.name == name:
            return each.default if each.default_factory is MISSING else each.default_factory()
    return MISSING
