"""The ranks of one group in one process. Each rank is a `Rig` and gets every command."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from lockstep.coordinator.collectives.in_process import InProcessGroup
from tests.kit.collectives.contract import PATIENCE_S
from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.rig import Rig

T = TypeVar("T")


class Rigs:
    """All ranks of a group, closed at the end of a `with` block.

    `rig` is the class of the ranks, and `settings` are its keyword arguments.
    """

    def __init__(self, ranks: int = 1, rig: type[Rig] = Rig, **settings: Any) -> None:
        here.begin()
        group = InProcessGroup(ranks)
        self._threads = ThreadPoolExecutor(ranks)
        members = [group.member(rank) for rank in range(ranks)]
        self.ranks: list[Rig] = self._at_once(lambda member: rig(member, **settings), members)

    def every(self, command: Callable[[Rig], T]) -> list[T]:
        """Run a command on all ranks concurrently; return the answers by rank."""
        return self._at_once(command, self.ranks)

    def serve(self, tokens: Sequence[int]) -> list[int]:
        """Serve a prompt on every rank; return how many tokens each rank had cached."""
        requests = self.every(lambda rig: rig.request(tokens))
        self.every(lambda rig: rig.admitted(requests[rig.rank]))
        cached = [request.prefix_len for request in requests]
        self.every(lambda rig: rig.extend(requests[rig.rank]))
        self.every(lambda rig: rig.end(requests[rig.rank]))
        return cached

    def settled(self) -> None:
        """Run iterations until all backups are complete; every rank needs equally many iterations."""
        self.every(lambda rig: rig.settled())

    def _at_once(self, command: Callable[[Any], T], members: Sequence[Any]) -> list[T]:
        running = [self._threads.submit(command, each) for each in members]
        return [each.result(PATIENCE_S) for each in running]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After a failure the ranks may be at different points. Close them without a flush, because a
        # flush would wait for the other ranks.
        if error is None:
            self.every(lambda rig: rig.close())
        else:
            self.every(lambda rig: rig.host.close(flush=False))
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def one_rig(**settings: Any) -> Generator[Rig]:
    """Run one rank, and check at the end that no slot is lost or locked."""
    with Rigs(**settings) as rigs:
        [rig] = rigs.ranks
        yield rig
        rig.settled()
        assert rig.lost() == 0
        assert rig.cache.protected_size() == 0
        rig.cache.sanity_check()
