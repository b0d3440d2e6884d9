"""The error path of a round whose ranks differ: it names the first operation that differs.

Each rank keeps a flight recorder: the last entries of what changed its replica, numbered, each with
the digest after it. When a round finds the digests different, the ranks gather the recorders, which
is one of the exceptions to the one collective per step, and compare them entry by entry.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from ..errors import DivergenceError, GroupError
from .codec import Codec
from .collective import Collective

ENTRIES_GATHERED = 512


_RECORDED: Final[Codec[tuple[int, list[str]]]] = Codec(tuple[int, list[str]])
"""See `Recorder.last`."""


class Recorder:
    """The last entries of what has changed a replica, in order. Entries are one line each."""

    def __init__(self, capacity: int = 4096) -> None:
        self.count = 0
        """How many entries were recorded since the start."""
        self._entries: deque[object] = deque(maxlen=capacity)

    def record(self, *entry: object) -> None:
        """Append an entry; its text is made only when somebody asks for it."""
        self._entries.append(entry)
        self.count += 1

    def last(self, number: int) -> tuple[int, list[str]]:
        """Return the index of the first of the last `number` entries, and their texts."""
        kept = list(self._entries)
        kept = kept[max(0, len(kept) - number) :]
        return self.count - len(kept), [
            " ".join(str(part) for part in self.parts(entry)) for entry in kept
        ]

    def parts(self, entry: object) -> Sequence[object]:
        """Return the parts of an entry, as it is kept."""
        return cast("tuple[object, ...]", entry)


def first_difference(recorders: Sequence[tuple[int, Sequence[str]]]) -> str | None:
    """Return a sentence that names the first entry in which the ranks differ, or None.

    `recorders` holds for each rank the index of its first entry and the entries. Only the stretch
    that every rank still remembers can be compared.
    """
    start = max(first for first, _ in recorders)
    stop = max(first + len(entries) for first, entries in recorders)
    for index in range(start, stop):
        at_index = [
            entries[index - first] if index - first < len(entries) else "nothing"
            for first, entries in recorders
        ]
        if len(set(at_index)) > 1:
            seen = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(at_index))
            return f"the first entry that differs is number {index} ({seen})"
    return None


def explain(
    collective: Collective, recorder: Recorder, different: Sequence[str], timeout_s: float
) -> DivergenceError:
    """Gather the recorders of all ranks and return the error that says what differs.

    Recorders of different starts of the group have nothing in common, and are not gathered.
    """
    what = " and ".join(different)
    if "epoch" in different:
        return DivergenceError(
            f"the ranks differ in {what}: they are not all of one start of the group; start all anew"
        )
    payload = _RECORDED.encode(recorder.last(ENTRIES_GATHERED))
    try:
        gathered = collective.gather(payload, timeout_s)
    except GroupError as error:
        return DivergenceError(
            f"the ranks differ in {what}, and their flight recorders could not be gathered: {error}"
        )
    found = first_difference([_RECORDED.decode(each) for each in gathered])
    where = found or "their flight recorders are equal as far back as they reach"
    return DivergenceError(f"the ranks differ in {what}: {where}")
