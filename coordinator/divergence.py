"""Error path of a round in which ranks diverge: find the first replica change that differs.

Each rank keeps a flight recorder: the latest changes of its replica, numbered, each with the state
digest after the change. If the ranks' digests differ, the ranks gather the recorders, outside of
rounds, and compare them entry by entry.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from ..errors import DivergenceError, GroupError
from .codec import Codec
from .collective import Collective

ENTRIES_GATHERED = 512


_RECORDED: Final[Codec[tuple[int, list[str]]]] = Codec(tuple[int, list[str]])
"""Codec of the result of `Recorder.last`: the index of the first entry, and the texts of the entries.
"""


class Recorder:
    """A flight recorder: the latest changes of one replica, in order, one line each."""

    def __init__(self, capacity: int = 4096) -> None:
        self.count = 0
        """The number of entries recorded since the start; entries that were dropped count, too."""
        self._entries: deque[object] = deque(maxlen=capacity)

    def record(self, *entry: object) -> None:
        """Append an entry. The entry is formatted only when the recorder is read."""
        self._entries.append(entry)
        self.count += 1

    def last(self, number: int) -> tuple[int, list[str]]:
        """Return (index, texts): the texts of the last `number` entries, and the index of the first."""
        kept = list(self._entries)
        kept = kept[max(0, len(kept) - number) :]
        return self.count - len(kept), [
            " ".join(str(part) for part in self.parts(entry)) for entry in kept
        ]

    def parts(self, entry: object) -> Sequence[object]:
        """Return the parts of a recorded entry, which are printed separated by spaces."""
        return cast("tuple[object, ...]", entry)


def first_difference(recorders: Sequence[tuple[int, Sequence[str]]]) -> str | None:
    """Return a clause that names the first entry in which the ranks differ; None if none differs.

    `recorders` has, for each rank, the index of its first entry and its entries. Entries that some rank
    no longer retains are not compared.
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
    """Gather the recorders of all ranks and return the error that names the difference.

    If the epochs differ, the ranks belong to different starts of the group. Their recorders cannot be
    compared and are not gathered.
    """
    what = " and ".join(different)
    if "epoch" in different:
        return DivergenceError(
            f"the ranks differ in {what}: they belong to different starts of the group; restart all"
        )
    payload = _RECORDED.encode(recorder.last(ENTRIES_GATHERED))
    try:
        gathered = collective.gather(payload, timeout_s)
    except GroupError as error:
        return DivergenceError(
            f"the ranks differ in {what}, and their flight recorders could not be gathered: {error}"
        )
    found = first_difference([_RECORDED.decode(each) for each in gathered])
    where = found or "their flight recorders are equal in all entries kept"
    return DivergenceError(f"the ranks differ in {what}: {where}")
