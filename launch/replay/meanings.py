"""Explanations of the rows of a replay's table, for `--explain` and for the HTML report."""

import re
from collections.abc import Mapping
from typing import Final

_POOL: Final = re.compile(r"^pool \S+:")

OF_A_REPLAY: Final[Mapping[str, str]] = {
    "requests served": "requests whose whole output was computed",
    "requests refused": "requests that can never fit the device pool; not in any other row",
    "requests retracted": "times that a request's pages were moved off the device for an older request",
    "resumed": "retracted requests that resumed with all their pages; the others restarted",
    "from storage": "resumed requests whose pages came from storage, because the host was full",
    "requests preempted": "times that a request lost its pages and restarted: they could not be saved",
    "wall time": "from the first request to the end of the last write to storage",
    "prompt tokens": "all tokens of the served prompts: the sum of the four rows below",
    "computed": "prompt tokens that were not cached on every rank, so the model computed them",
    "hit on the device (L1)": "prompt tokens whose pages were on the device already",
    "hit in host memory (L2)": "prompt tokens whose pages were copied from host memory to the device",
    "hit in storage (L3)": "prompt tokens whose pages were read from storage",
    "pool NAME: pages in L1 + L2": "pages of each rank on the device and on the host, and their size",
    "pages compared": "pages of this pool compared with the computed bytes, over all ranks",
    "steps": "engine steps; each schedules, computes and ends with one round",
    "rounds": "votes of all ranks on the operations in flight; one per step",
    "collectives": "collectives that a rank launched for its rounds; one per round",
    "transport": "transport of the rounds, and the reason for it",
    "time in Cache.step p50": "median time that a step blocked the engine: the vote and its processing",
    "time in Cache.step p99": "the same, 99th percentile",
    "operations ended": "prefetches, loads, backups and writes to storage that have finished",
    "of them failed": "failed operations: each was a miss or was not stored; not a fault",
    "operations left at the end": "operations in flight after the last write; more than 0 is a fault",
    "device to host": "bytes that all ranks copied from the device to host memory (backups)",
    "host to device": "bytes that all ranks copied from host memory to the device (loads)",
    "host to storage": "bytes that all ranks wrote to storage",
    "storage to host": "bytes that all ranks read from storage (prefetches)",
    "pages verified when used": "pages from the cache that were compared before a request used them",
    "pages verified at the end": "pages that were compared again when their request had finished",
    "pages corrupt": "pages with wrong bytes that were used; more than 0 is a fault",
    "objects bad in storage": "corrupt objects found by checksum; each was a miss",
    "storage calls that timed out": "calls to the store without an answer at their deadline",
    "waited for them": "total time of these calls; parallel calls are summed",
    "replicas equal": "whether all ranks had the same state at the end; NO is a fault",
}


def meaning_of(label: str) -> str:
    """Return the explanation of a table row, by its label; empty for a row that needs none."""
    return OF_A_REPLAY.get(_POOL.sub("pool NAME:", label.strip()), "")


def print_meanings() -> None:
    """Print the explanation of each row of a replay's table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for label, meaning in OF_A_REPLAY.items():
        table.add_row(label, meaning)
    Console(highlight=False, emoji=False).print(table)
