"""A group in threads of this process that does what an operator asks, and nothing else."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep import Cache, CacheConfig, Column, Control, PageLayout, ask
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.ranks.group.control.inbox import OpenInbox, open_inbox
from lockstep.ranks.group.control.leading_inbox import LeadingInbox
from lockstep.ranks.replica.operations.requests import LoadState

PAGE_TOKENS = 4
LAYOUT = PageLayout(
    page_tokens=PAGE_TOKENS, columns=(Column(name="k", layers=1, heads=4, elements=1),)
)
OPENS_S = 60.0
END = b"the engine is to end"


def config_with(control: Control, **settings: Any) -> CacheConfig:
    """Return the settings of a small cache that takes requests."""
    return CacheConfig(
        model="m", layout=LAYOUT, device_pages=32, host_pages=32, control=control, **settings
    )


class AskedGroup:
    """Steps on its ranks side by side, and lets the engine keep the messages that it is told of.

    Its inbox is the engine's own, by which messages of another kind come as well.
    """

    def __init__(
        self, config: CacheConfig, ranks: int = 2, *, prepare: Callable[[Cache], None] | None = None
    ) -> None:
        """`prepare` is what each rank does before it takes steps."""
        self._config = config
        self._prepare = prepare
        self._inbox: Future[LeadingInbox] = Future()
        self._threads = ThreadPoolExecutor(ranks)
        group = InProcessGroup(ranks)
        self._ranks = [self._threads.submit(self._run, group, rank) for rank in range(ranks)]
        self.inbox = self._inbox.result(OPENS_S)

    def ask(self, what: str, **asked: Any) -> Any:
        """Ask as an operator's process does."""
        assert self._config.control is not None
        return ask(self._config.control.path, what, **asked)

    def end(self) -> list[list[bytes]]:
        """End all ranks in the same step; return the messages that the engine of each was told of."""
        self.inbox.submit(END)
        try:
            return [each.result(OPENS_S) for each in self._ranks]
        finally:
            self._threads.shutdown()

    def _run(self, group: InProcessGroup, rank: int) -> list[bytes]:
        member = group.member(rank)
        inbox: OpenInbox | None = None
        try:
            inbox = open_inbox(member, OPENS_S)
            cache = Cache.open(self._config, member, inbox=inbox)
        except BaseException as error:
            if inbox is not None:
                inbox.close()
            if not rank:
                self._inbox.set_exception(error)
            raise
        cache.at_close(inbox.close)
        if self._prepare is not None:
            self._prepare(cache)
        if isinstance(inbox, LeadingInbox):
            self._inbox.set_result(inbox)
        told: list[bytes] = []
        while END not in told:
            cache.step(idle_s=0.01)
            told += cache.messages()
        cache.close(flush=False)
        return told


def computes(request: str, tokens: list[int], namespace: str = "") -> Callable[[Cache], None]:
    """Return what computes and publishes a prompt on a rank, and goes on holding it."""

    def program(cache: Cache) -> None:
        cache.load_back(request, tokens[:-1], namespace, reserve_tokens=len(tokens))
        while cache.load_state(request) is not LoadState.READY:
            cache.step()
        cache.insert(request, tokens)

    return program


def socket_in(folder: Path) -> Control:
    """Return where a group listens in a folder of a test."""
    return Control(path=str(folder / "s"))


def asked_of(cache: Cache, control: Control, what: str, **asked: Any) -> Any:
    """Ask a group of one rank, whose engine is this thread; return what became of it."""
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, control.path, what, **asked)
        while not asking.done():
            cache.step(idle_s=0.01)
        return asking.result()
