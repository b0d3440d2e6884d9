"""What a batch is, as facts that must be the same on every rank."""

from typing import TypeAlias

from .engine.contract import Batch

Facts: TypeAlias = tuple[str | int | list[list[str | int]], ...]


def batch_facts(batch: Batch, *, each: bool) -> Facts:
    """Return the batch's mode, and of which requests it computes how much.

    Of a prefill the requests by name, with the tokens that are there and those that are computed. Of
    the others how many there are, and with `each` them all: they change little from pass to pass.
    """
    mode, parts = str(batch.forward_mode.name), list[list[str | int]]()
    if batch.forward_mode.is_extend():
        parts += [[each.rid, each.prefix_len, each.extend_end or 0] for each in batch.reqs]
    elif each:
        parts += [[each.rid, len(each.output_ids)] for each in batch.reqs]
    else:
        return mode, len(batch.reqs)
    return mode, parts
