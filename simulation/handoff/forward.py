"""A model that computes symbols, for the small engine's schedulers (`small_engine.forward_pass`)."""

from collections.abc import Mapping, Sequence

from ...ranks.cache import Cache
from ...small_engine.contents import KeyedTokens
from ...small_engine.counts import ComparedPages
from ...small_engine.forward_pass import TokenSpan
from ..contents import Contents
from ..engine.every_rank import NO_PAGE, every_rank
from ..engine.model import Model
from ..engine.request import EngineRequest
from ..rank.memory import SymbolicMemory


class SymbolicForward:
    """The model on one rank. Whatever it reads must hold what belongs there."""

    def __init__(
        self,
        cache: Cache,
        memory: SymbolicMemory,
        contents: Contents,
        namespaces: Mapping[str, str],
    ) -> None:
        """`namespaces` says in which one each request was sent, whatever has become of that since."""
        self._cache = cache
        self._namespaces = namespaces
        self._model = Model(cache.config, contents)
        self._model.begin_epoch(every_rank([memory]))

    def compute(self, spans: Sequence[TokenSpan]) -> None:
        """See `Forward`. A page that is not full has content, too, so that all of it is checked."""
        for span in spans:
            request = self._request(span.request, span.tokens, span.start, room=span.stop)
            self._model.check_tables(request)
            self._model.compute(request, span.stop)

    def begin_page(self, request: str, tokens: KeyedTokens, computed: int) -> None:
        """See `Forward`; nothing is left to do."""

    def verify(
        self, request: str, tokens: KeyedTokens, computed: int, *, moved: bool = False
    ) -> dict[str, ComparedPages]:
        """See `Forward`. Raises for a page that is wrong or missing."""
        del moved
        known = self._request(request, tokens, computed, room=computed)
        self._model.check_tables(known)
        return {
            pool: ComparedPages(len(table) - table.count(NO_PAGE), 0)
            for pool, table in known.tables.items()
        }

    def _request(self, name: str, tokens: KeyedTokens, computed: int, room: int) -> EngineRequest:
        request = EngineRequest(name, self._namespaces[name], tokens.ids.tobytes(), len(tokens.ids))
        request.computed, request.room = computed, room
        for layers in self._model.layers:
            request.tables[layers.pool] = self._cache.page_table(name, layers.pool).tolist()
        return request
