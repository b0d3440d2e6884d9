"""A group whose ranks only answer an operator's control requests, in threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep import Cache, CacheConfig, Column, Control, PageLayout, PeerLost, ask
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.ranks.replica.operations.requests import LoadState

PAGE_TOKENS = 4
LAYOUT = PageLayout(
    page_tokens=PAGE_TOKENS, columns=(Column(name="k", layers=1, heads=4, elements=1),)
)
OPENS_S = 60.0


def config_with(control: Control, **settings: Any) -> CacheConfig:
    return CacheConfig(
        model="m", layout=LAYOUT, device_pages=32, host_pages=32, control=control, **settings
    )


class ControlledGroup:
    """A group whose ranks step in parallel threads until `end` is called."""

    def __init__(
        self, config: CacheConfig, ranks: int = 2, *, prepare: Callable[[Cache], None] | None = None
    ) -> None:
        """Each rank calls `prepare` with its cache before the first step."""
        self._config = config
        self._prepare = prepare
        self._steps = Future[None]()
        self._ends = threading.Event()
        self._threads = ThreadPoolExecutor(ranks)
        group = InProcessGroup(ranks)
        self._ranks = [self._threads.submit(self._run, group, rank) for rank in range(ranks)]
        self._steps.result(OPENS_S)

    def ask(self, what: str, **fields: Any) -> Any:
        """Send a control request from another thread, as an operator's process would."""
        assert self._config.control is not None
        return ask(self._config.control.path, what, **fields)

    def end(self) -> None:
        self._ends.set()
        self._threads.shutdown()

    def _run(self, group: InProcessGroup, rank: int) -> None:
        try:
            cache = Cache.open(self._config, group.member(rank))
        except BaseException as error:
            if not rank:
                self._steps.set_exception(error)
            raise
        if self._prepare is not None:
            self._prepare(cache)
        if not rank:
            self._steps.set_result(None)
        with suppress(PeerLost):
            while not self._ends.is_set():
                cache.step(idle_s=0.01)
        cache.abandon()


def computes(request: str, tokens: list[int], namespace: str = "") -> Callable[[Cache], None]:
    """Return a function that computes and inserts a prompt on a rank, without releasing the request."""

    def program(cache: Cache) -> None:
        cache.load_back(request, tokens[:-1], namespace, reserve_tokens=len(tokens))
        while cache.load_state(request) is not LoadState.READY:
            cache.step()
        cache.insert(request, tokens)

    return program


def socket_in(folder: Path) -> Control:
    """Return the control socket's settings for a group in a test's folder."""
    return Control(path=str(folder / "s"))


def reply_to_request(step: Callable[[], None], control: Control, what: str, **fields: Any) -> Any:
    """Send a control request; step the group with `step` until the reply arrives; return the reply."""
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, control.path, what, **fields)
        while not asking.done():
            step()
        return asking.result()
