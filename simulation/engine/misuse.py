"""Invalid calls to a cache, which every rank must refuse without changing anything."""

from collections.abc import Callable, Sequence
from random import Random

from ...errors import UsageError
from ...ranks.group.cache import Cache
from ...ranks.replica.operations.requests import LoadState
from ..rank.cluster import AnyCache
from ..world.request import EngineRequest, EngineStage
from ..world.violated import Violated

WrongCall = tuple[str, Callable[[AnyCache], object]]
"""(description of an invalid call, function that makes the call)."""


def misuse(
    caches: Sequence[Cache], request: EngineRequest, random: Random, page_tokens: int
) -> bool:
    """Make one call that is invalid in the stage of `request`, and check that it is refused.

    Return False if there is no such call.
    """
    wrong = _wrong_calls(caches, request, page_tokens)
    if not wrong:
        return False
    what, command = random.choice(wrong)
    refuse(caches, f"{what} of request {request.name}", command)
    return True


def refuse(caches: Sequence[AnyCache], what: str, command: Callable[[AnyCache], object]) -> None:
    """Make an invalid call on every rank; raise unless it is refused and changes nothing."""
    for rank, cache in enumerate(caches):
        before = (cache.inspection.digest, cache.inspection.state_digest)
        try:
            command(cache)
        except UsageError:
            pass
        else:
            raise Violated(f"rank {rank}: {what} was not refused")
        if (cache.inspection.digest, cache.inspection.state_digest) != before:
            raise refused_and_changed(rank, what)


def refused_and_changed(rank: int, what: str) -> Violated:
    """Return a violation message: a refused call has changed the rank's state."""
    return Violated(f"rank {rank}: {what} was refused, but changed the state")


def _wrong_calls(
    caches: Sequence[Cache], request: EngineRequest, page_tokens: int
) -> list[WrongCall[Cache]]:
    name, namespace, tokens = request.name, request.namespace, request.head(request.prompt - 1)
    unknown: list[WrongCall[Cache]] = [
        ("release of an unknown name", lambda c: c.release(f"{name}?")),
        ("load_state of an unknown name", lambda c: c.load_state(f"{name}?")),
        ("half a token", lambda c: c.match(tokens + b"\0", namespace)),
    ]
    if request.stage not in (EngineStage.LOADING, EngineStage.COMPUTING, EngineStage.ANSWERING):
        return unknown
    wrong: list[WrongCall[Cache]] = [
        ("a second load_back", lambda c: c.load_back(name, tokens, namespace)),
        ("a prefetch after load_back", lambda c: c.prefetch(name, tokens, namespace)),
        ("another namespace", lambda c: c.load_back(name, tokens, f"{namespace}?")),
    ]
    if request.stage is EngineStage.LOADING:
        if caches[0].load_state(name) is not LoadState.LOADING:
            return unknown
        return [
            *wrong,
            ("an early extend", lambda c: c.extend(name, request.prompt)),
            ("an early insert", lambda c: c.insert(name, tokens, final=False)),
        ]
    too_long = request.tokens + bytes(4) * (len(request.table) + 1) * page_tokens
    wrong.append(("a long insert", lambda c: c.insert(name, too_long)))
    if request.shared:
        wrong.append(("a short insert", lambda c: c.insert(name, b"")))
    return wrong
