"""Explanations of the rows of a replay's table, for `--explain` and for the page of a report."""

import re
from collections.abc import Mapping
from typing import Final

_POOL: Final = re.compile(r"^pool \S+:")

OF_A_REPLAY: Final[Mapping[str, str]] = {
    "requests served": "requests whose whole output was computed",
    "requests refused": "requests that can never fit the device pool; nothing else counts them",
    "requests retracted": "how often one left the device with all it had, for an older one to go on",
    "resumed": "how many of those came back with all they had; the others began again",
    "from storage": "how many of those came back out of storage, since host memory had no room",
    "requests preempted": "how often one gave its pages up and began again: it could not be saved",
    "wall time": "from the first request to the end of the last write to storage",
    "prompt tokens": "all tokens of the prompts that were served: the four rows below together",
    "computed": "prompt tokens that were not cached on every rank, so the model computed them",
    "hit on the device (L1)": "prompt tokens whose pages were on the device already",
    "hit in host memory (L2)": "prompt tokens whose pages were copied from host memory to the device",
    "hit in storage (L3)": "prompt tokens whose pages were read from storage",
    "pool NAME: pages in L1 + L2": "pages of each rank on the device and on the host, and their size",
    "pages compared": "pages of this pool that were compared with what was computed, over all ranks",
    "steps": "steps of the engine: each decides, computes and ends with one round",
    "rounds": "votes of all ranks on what is in flight; one for each step",
    "collectives": "collectives that a rank launched for its rounds: one for each",
    "carried by": "what carried the rounds, and why",
    "time in Cache.step p50": "half of the steps kept the engine no longer: the vote and what follows",
    "time in Cache.step p99": "the same for all but one step of a hundred",
    "operations ended": "prefetches, loads, backups and writes to storage that have come to an end",
    "of them failed": "those that failed: each was a miss or was not stored, and is no fault by itself",
    "operations left at the end": "those in flight when everything was written; more than 0 is a fault",
    "device to host": "bytes that all ranks copied from the device to host memory (backups)",
    "host to device": "bytes that all ranks copied from host memory to the device (loads)",
    "host to storage": "bytes that all ranks wrote to storage",
    "storage to host": "bytes that all ranks read from storage (prefetches)",
    "pages verified when used": "pages from the cache that were compared before a request used them",
    "pages verified at the end": "pages that were compared once more when their request had finished",
    "pages corrupt": "pages with wrong bytes that were used; more than 0 is a fault",
    "objects bad in storage": "damaged objects: found by their checksum, and a miss each",
    "storage calls that timed out": "calls to the store that had no answer when their time was up",
    "waited for them": "how long these calls took, summed over those that ran side by side",
    "replicas equal": "whether all ranks had the same state at the end; NO is a fault",
}


def meaning_of(label: str) -> str:
    """Return the explanation of a row; empty for a row that needs none."""
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
