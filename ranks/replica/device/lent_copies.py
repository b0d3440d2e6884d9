"""The copies that touch device pages which an engine lends: once they end, the pages are free."""

from collections.abc import Sequence

from ....coordinator.operation import Phase
from ..core.basis import Basis
from ..operations.agenda import Agenda
from ..operations.kinds import Copy
from ..operations.lent import unfilled_after
from ..operations.requests import Request, Requests, require_name
from ..tree.components import Component


class LentCopies:
    """The copies of each request, also of one that was released and whose pages are not free yet."""

    def __init__(
        self, basis: Basis, components: Sequence[Component], agenda: Agenda, requests: Requests
    ) -> None:
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._components = components
        self._operations = agenda.in_flight
        self._requests = requests
        self.leaving: dict[str, set[int]] = {}
        """Requests that were released, and the copies that still touch their device pages."""

    def of(self, request: Request) -> set[int]:
        """Return the copies in flight that touch what a request lends. Reads only."""
        return self._in_flight(request.copies)

    def are_awaited(self, request: Request) -> bool:
        """Say whether any of them is waited for: one that hangs is not, once it is quarantined."""
        return any(not self._hangs(each) for each in self.of(request))

    def began(self, request: Request, copy: int | None) -> None:
        """Take note of a copy of what a request lends, if there is one."""
        if copy is not None:
            request.copies = self.of(request) | {copy}

    def load_began(self, request: Request, first: int, starts: Sequence[int]) -> None:
        """Take note of the load that a request waits for, and of lent pages that it does not fill.

        It fills those of each component from `starts` on, of the pages that are lent from `first` on.
        """
        load, before = request.waits_for, request.unfilled
        assert load is not None
        self.began(request, load)
        request.unfilled = unfilled_after(load, self._components, first, starts, before)
        # It follows from which pages the engine lends, which must be the same on every rank.
        self._journal.record("unfilled", load, first, starts)

    def touching(self, name: str | None, *, awaited: bool = False) -> tuple[int, ...]:
        """Return the copies that touch pages lent by a request, or by any. Reads only.

        Only those that are waited for, with `awaited`.
        """
        if awaited:
            return tuple(each for each in self.touching(name) if not self._hangs(each))
        if name is None:
            return tuple(n for n, each in self._operations.items() if isinstance(each, Copy))
        request = self._requests.get(name)
        copies = self.leaving.get(name, set()) if request is None else request.copies
        return tuple(sorted(self._in_flight(copies)))

    def is_leaving(self, name: str) -> bool:
        """Say whether a request was released and still lends pages."""
        require_name("request", name)
        return name in self.leaving

    def leave(self, request: Request) -> bool:
        """Forget a request; say whether its pages are free."""
        copies = self.of(request)
        self._requests.leave(request)
        if copies:
            self.leaving[request.id] = copies
        return not copies

    @property
    def waits(self) -> bool:
        """Whether some released request's device pages are not free yet, and will be.

        Those of a copy that is quarantined may never be.
        """
        return any(not any(map(self._hangs, each)) for each in self.leaving.values())

    def after_verdict(self) -> None:
        """Tell of the requests whose lent pages have become free."""
        for name in [name for name, each in self.leaving.items() if not self._in_flight(each)]:
            del self.leaving[name]
            self._outbox.freed.append(name)

    def _in_flight(self, copies: set[int]) -> set[int]:
        return {number for number in copies if number in self._operations}

    def _hangs(self, copy: int) -> bool:
        operation = self._operations.get(copy)
        return operation is not None and operation.phase is Phase.QUARANTINED
