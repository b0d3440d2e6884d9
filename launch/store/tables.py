"""Output of the store commands: text and tables for people, JSON for programs."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ...page_format.object_name import ObjectName
from ...storage_backends.base import StoredObject
from ...storage_backends.records.catalogue import (
    Catalogue,
    ModelContents,
    NamespaceContents,
    ShardContents,
    Totals,
    stored_bytes,
)
from ...storage_backends.records.manifest import Manifest
from ..cli.amounts import age_in_words, bytes_in_words, count, printable, well_formed
from .batches import Defects

_DIGITS: Final = 16
"""Number of digits of a namespace's digest that are printed. Commands accept the beginning of a digest.
"""
_WRITER: Final = re.compile(r"stage[0-9]+of([0-9]+)\.tp([0-9]+|\.all)")
_WIDE: Final = 160
"""Width of output that does not go to a terminal, so that long lines in a file are not wrapped."""

Record = dict[str, Any]


def say(line: str = "", *, style: str | None = None) -> None:
    """Print one line of a result, without wrapping it."""
    _console().print(line, style=style, soft_wrap=True)


def print_json(record: Mapping[str, object], *, lines: bool = False) -> None:
    """Print one JSON object; on a single line if `lines` is true."""
    print(json.dumps(well_formed(record), indent=None if lines else 2))


def object_line(stored: StoredObject) -> str:
    """Return one line of text that describes an object: size, age and name."""
    size, age = bytes_in_words(stored_bytes(stored)), age_in_words(stored.age_s)
    return f"{size:>10}  {age:>7}  {full_name(stored.name)}"


def object_record(stored: StoredObject) -> Record:
    """Return a JSON record that describes an object."""
    name = stored.name
    return {
        "namespace": name.namespace,
        "key": name.key,
        "pool": name.pool,
        "shard": name.shard,
        "bytes": stored_bytes(stored),
        "age_s": stored.age_s,
    }


def full_name(name: ObjectName) -> str:
    """Return an object's name in the form in which commands print it."""
    return f"{name.namespace}/{name.key}/{name.pool}/{name.shard}"


def contents_record(uri: str, catalogue: Catalogue) -> Record:
    """Return the JSON record for `ls --json`; the keys are a stable interface."""
    unreadable = [name for name, manifest in catalogue.manifests.items() if manifest is None]
    return {
        "store": uri,
        "objects": catalogue.total.objects,
        "bytes": catalogue.total.nbytes,
        "models": [_model_record(each) for each in catalogue.models()],
        "unreadable_manifests": sorted(name.namespace for name in unreadable),
    }


def print_contents(uri: str, catalogue: Catalogue) -> None:
    """Print the objects of a store by model and shard, as `ls` shows them."""
    total, models = catalogue.total, catalogue.models()
    if not total.objects:
        say(f"{uri}: empty")
        return
    known = sum(each.manifest is not None for each in models)
    size = bytes_in_words(total.nbytes)
    summary = f"{count(known, 'model')}, {count(total.objects, 'object')}, {size}"
    say(f"{uri}: {summary}")
    for model in models:
        say()
        _print_model(model)
    unreadable = sum(each is None for each in catalogue.manifests.values())
    if unreadable:
        say(
            f"\n{count(unreadable, 'manifest')} could not be read, or came from another version of"
            " Lockstep"
        )


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names with their values, one per line."""
    width = 3 + max(len(name) for name, _ in facts)
    for name, value in facts:
        say(f"{name:<{width}}{value}")


def print_found(what: str, found: Defects) -> None:
    """Print a heading for objects with a defect, and the names of the first of these objects."""
    if not found.objects:
        return
    by = ", ".join(f"{number:,} {each}" for each, number in sorted(found.outcomes.items()))
    more = "" if found.objects == len(found.first) else f", the first {len(found.first)}"
    say(f"{what}{f' ({by})' if by else ''}{more}:", style="bold")
    for name in found.first:
        say(f"  {full_name(name)}")


def found_record(found: Defects) -> Record:
    """Return a JSON record of the objects that have a defect."""
    return {
        "objects": found.objects,
        "outcomes": dict(found.outcomes),
        "first": [full_name(name) for name in found.first],
    }


def model_title(manifest: Manifest | None) -> str:
    """Return a heading with a model's name and its weights version."""
    if manifest is None:
        return "unknown model: no manifest in the store describes these objects"
    version = printable(manifest.weights_version)
    weights = f", weights version {version}" if version else ""
    return f"{printable(manifest.model)}{weights}"


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDE
    return Console(highlight=False, emoji=False, markup=False, width=width)


def _print_model(model: ModelContents) -> None:
    say(model_title(model.manifest), style="bold")
    if model.manifest is not None:
        for pool, layout in sorted(model.manifest.layouts.items()):
            columns = ", ".join(printable(each.name) for each in layout.columns)
            tokens = count(layout.page_tokens, "token")
            say(f"  {printable(pool)}: pages of {tokens}, {columns}")
    if not model.namespaces:
        say("  no pages")
    for namespace in model.namespaces:
        _print_namespace(namespace)


def _print_namespace(namespace: NamespaceContents) -> None:
    digest = namespace.namespace
    shown = f"{digest[:_DIGITS]}…" if len(digest) > _DIGITS else digest
    # Print each writer once. Every pipeline stage of a group leaves its own mark, but with the same
    # text.
    by = ", ".join(dict.fromkeys(map(_writer, namespace.writers)))
    written = f", written by groups of {by}" if by else ""
    say(f"  namespace {shown}{written}")
    if not namespace.shards:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("    pool", overflow="fold")
    table.add_column("shard", overflow="fold")
    for title in ("TP", "objects", "size", "newest", "oldest"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in namespace.shards:
        table.add_row(f"    {each.pool}", each.shard, _tp_size(each), *_cells(each.extent))
    _console().print(table)


def _tp_size(shard: ShardContents) -> str:
    if shard.tp_size is not None:
        return str(shard.tp_size)
    return "any" if shard.shard.endswith(".all") else "-"


def _cells(extent: Totals) -> tuple[str, ...]:
    return (
        f"{extent.objects:,}",
        bytes_in_words(extent.nbytes),
        age_in_words(extent.newest_s),
        age_in_words(extent.oldest_s),
    )


def _writer(mark: str) -> str:
    match = _WRITER.fullmatch(mark)
    if match is None:
        return mark
    stages = f" in {match[1]} stages" if match[1] != "1" else ""
    # A writer's mark ends in `.all` if the pages that the group wrote do not depend on the TP size.
    size = "any TP size" if match[2] == ".all" else f"TP {match[2]}"
    return f"{size}{stages}"


def _model_record(model: ModelContents) -> Record:
    manifest = model.manifest
    return {
        "model": None if manifest is None else manifest.model,
        "weights_version": None if manifest is None else manifest.weights_version,
        "layouts": None if manifest is None else _layouts_record(manifest),
        **_extent_record(model.extent),
        "namespaces": [_namespace_record(each) for each in model.namespaces],
    }


def _layouts_record(manifest: Manifest) -> Record:
    return {
        pool: {
            "page_tokens": layout.page_tokens,
            "columns": [asdict(each) for each in layout.columns],
        }
        for pool, layout in sorted(manifest.layouts.items())
    }


def _namespace_record(namespace: NamespaceContents) -> Record:
    return {
        "namespace": namespace.namespace,
        "writers": list(namespace.writers),
        **_extent_record(namespace.extent),
        "shards": [
            {
                "pool": each.pool,
                "shard": each.shard,
                "tp_size": each.tp_size,
                **_extent_record(each.extent),
            }
            for each in namespace.shards
        ],
    }


def _extent_record(extent: Totals) -> Record:
    return {
        "objects": extent.objects,
        "bytes": extent.nbytes,
        "newest_s": extent.newest_s,
        "oldest_s": extent.oldest_s,
    }
