"""Blocking reads of objects from a Mooncake Store, called from several threads.

An object is stored under a key with its *generation* (`names`), and a stored generation never changes.
To add columns, a writer stores the object under the next generation and then removes the earlier ones.
So a reader that finds no object, or one without a wanted column, queries later generations. No
generation is stored twice (see `writes`).

The memory of a removed object may be reused during a read. Then the checksums do not match although no
object is corrupt. So a reader treats an object as corrupt only after two failures.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ...page_format.object_header import HeaderFinding, check_header, presence_bits
from ..base import ReadOutcome
from ..threaded_backend import Stop
from .client import MooncakeClient
from .memory import RegisteredMemory
from .names import GENERATIONS, WantedObject, key_of
from .pieces import Code
from .staged_reads import StagedReads

_TRIES: Final = 8
"""Maximum attempts of one read; an attempt fails only if the object was replaced or removed meanwhile.
"""


class Look(NamedTuple):
    """The result of reading an object's header and comparing it with the wanted object."""

    code: int
    """The library's return code of the read of the header; negative if the read failed."""
    finding: HeaderFinding = HeaderFinding.SOUND
    present: int = 0


class ObjectReader:
    """Reads objects through one client. Thread-safe."""

    def __init__(self, client: MooncakeClient, memory: RegisteredMemory) -> None:
        self.client = client
        self._staged = StagedReads(client, memory)

    def latest(self, digests: Sequence[bytes]) -> list[int | None]:
        """Return per object its highest stored generation, or None if no generation seems to exist.

        The result is a hint: while an object is being replaced, the result may be None or an earlier
        generation.
        """
        keys = [key_of(digest, each) for digest in digests for each in range(GENERATIONS)]
        found = self.client.exist(keys) if keys else []
        return [
            max((each for each in range(GENERATIONS) if found[at + each]), default=None)
            for at in range(0, len(found), GENERATIONS)
        ]

    def later(self, wanted: Sequence[WantedObject], generation: int) -> list[int]:
        """Return per object its highest stored generation above `generation`, or 0 if there is none.

        If the master does not answer, the value is a negative error code. Generations are queried in
        ascending order, one call each, because a writer stores a generation before it removes the
        earlier one. So a generation that existed at the start is missed only if a later one is found.
        """
        found = [0] * len(wanted)
        for each in range(generation + 1, GENERATIONS):
            queried = [
                at
                for at, want in enumerate(wanted)
                if each <= want.last_generation and found[at] >= 0
            ]
            if not queried:
                break
            codes = self.client.presence([key_of(wanted[at].digest, each) for at in queried])
            for at, code in zip(queried, codes, strict=True):
                if code:
                    found[at] = each if code == 1 else min(code, -1)
        return found

    def read(self, wanted: Sequence[WantedObject], stop: Stop) -> list[ReadOutcome]:
        """Fill the buffers of the objects, verify them, and return one outcome per object."""
        outcomes = self._staged.read([key_of(each.digest) for each in wanted], wanted, stop)
        doubtful = (ReadOutcome.MISSING, ReadOutcome.LACKING, ReadOutcome.CORRUPT)
        open_ends = [
            at
            for at, outcome in enumerate(outcomes)
            if outcome is ReadOutcome.CORRUPT
            or (outcome in doubtful and wanted[at].last_generation)
        ]
        latest = self.later([wanted[at] for at in open_ends], 0)
        for at, generation in zip(open_ends, latest, strict=True):
            outcomes[at] = self._read_again(wanted[at], outcomes[at], generation, stop)
        return outcomes

    def read_at(self, want: WantedObject, generation: int, stop: Stop) -> ReadOutcome:
        """Read one generation of an object into its buffers; remove the generation if it is corrupt."""
        outcome = ReadOutcome.CORRUPT
        for _ in range(2):
            if stop.due():
                return ReadOutcome.TIMED_OUT
            (outcome,) = self._staged.read([key_of(want.digest, generation)], [want], stop)
            if outcome is not ReadOutcome.CORRUPT:
                return outcome
        self.client.remove([key_of(want.digest, generation)])
        return outcome

    def look(self, want: WantedObject, generation: int, stop: Stop) -> Look:
        """Read the header of one generation, and compare it with the wanted object."""
        header = self._staged.header(key_of(want.digest, generation), stop)
        if isinstance(header, int):
            return Look(0, HeaderFinding.SHORT) if header == Code.INVALID else Look(header)
        finding = check_header(memoryview(header), want.digest, want.shape)
        there = finding in (HeaderFinding.SOUND, HeaderFinding.LACKING)
        return Look(0, finding, presence_bits(header) if there else 0)

    def _read_again(
        self, want: WantedObject, outcome: ReadOutcome, generation: int, stop: Stop
    ) -> ReadOutcome:
        """Return the final outcome of a read, after trying the generations above 0.

        `outcome` is the outcome of reading generation 0. `generation` is the result of `later`: the
        highest generation above 0, or 0, or an error code.
        """
        seen = 0
        for _ in range(_TRIES):
            if generation < 0:
                return ReadOutcome.FAILED
            # Read a corrupt object again, because it may have been removed during the read.
            if generation == seen and outcome is not ReadOutcome.CORRUPT:
                return outcome
            outcome, seen = self.read_at(want, generation, stop), generation
            if outcome is not ReadOutcome.MISSING:
                return outcome
            (after,) = self.later([want], generation)
            generation = after or generation
        return outcome
