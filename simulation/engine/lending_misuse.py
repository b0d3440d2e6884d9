"""Invalid calls that an engine with its own device pages can make, which the cache must refuse."""

from collections.abc import Sequence
from random import Random

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.operations.requests import LoadState
from ..world.prompts import TOKEN_BYTES
from ..world.request import EngineRequest, EngineStage
from .misuse import WrongCall, refuse


def misuse(
    caches: Sequence[HostCache], request: EngineRequest, leaving: Sequence[str], random: Random
) -> None:
    """Make one invalid call about `request`, or about a request in `leaving`, and check the refusal.

    The stage of `request` determines which calls are invalid. Requests in `leaving` are released, but
    copies may still access their pages.
    """
    unit = caches[0].config.layout.page_tokens * TOKEN_BYTES
    name, namespace, tokens = request.name, request.namespace, request.head(request.prompt - 1)
    wrong: list[WrongCall[HostCache]] = [
        ("load_state of an unknown name", lambda c: c.load_state(f"{name}?")),
        ("load for an unknown name", lambda c: c.load(f"{name}?", tokens, [0])),
        ("half a token", lambda c: c.match_host(name, tokens + b"\0", namespace)),
        ("back_up of half a token", lambda c: c.back_up(name, tokens + b"\0", [], namespace)),
        ("back_up without pages", lambda c: c.back_up(f"{name}?", bytes(1 << 12), [], namespace)),
        ("a page that is no number", lambda c: c.load(name, tokens, [1 << 40])),
    ]
    if name in caches[0].inspection.requests:
        wrong.extend(
            [
                ("another namespace", lambda c: c.match_host(name, tokens, f"{namespace}?")),
                ("a load without pages", lambda c: c.load(name, tokens, [])),
                ("a load of too much", lambda c: c.load(name, bytes(4 << 12), range(4 << 12))),
                ("a retract without pages", lambda c: c.retract(name, bytes(4), [])),
                ("an unknown pool", lambda c: c.back_up(name, b"", {"draft": []}, namespace)),
            ]
        )
        if request.stage is not EngineStage.RETRACTED:
            wrong.append(("a resume of one that was not retracted", lambda c: c.resume(name, [])))
    if request.admitted:
        wrong.append(("a late prefetch", lambda c: c.prefetch(name, tokens, namespace)))
    copies = request.stage in (EngineStage.LOADING, EngineStage.RETRACTED)
    if copies and caches[0].load_state(name) not in (LoadState.READY, LoadState.FAILED):
        wrong.extend(
            [
                ("a fence during a copy", lambda c: c.fence(name)),
                ("a back_up during a copy", lambda c: c.back_up(name, tokens, [0] * 99, namespace)),
                ("a retract during a copy", lambda c: c.retract(name, b"", [])),
                (
                    "a load during a copy",
                    lambda c: c.load(name, tokens, [0] * (len(tokens) // unit)),
                ),
                ("a resume with too many pages", lambda c: c.resume(name, [0] * 9999)),
            ]
        )
    if leaving:
        wrong.append(("a name that is leaving", lambda c: c.match_host(leaving[0], b"")))
    what, command = random.choice(wrong)
    refuse(caches, f"{what} ({name})", command)
