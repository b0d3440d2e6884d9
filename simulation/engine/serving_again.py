"""Serves old prompts again from memory, after the store has lost its objects."""

from collections.abc import Callable, Iterable, Sequence

from ...ranks.group.cache import Cache
from ...ranks.protocol.answers import Admission, Wait
from ...ranks.replica.operations.requests import LoadState
from ..rank.cluster import ask
from ..world.prompts import TOKEN_BYTES

Prompt = tuple[str, bytes]
"""The namespace and the tokens of a prompt."""


def serve_again(
    caches: Sequence[Cache], prompts: Iterable[Prompt], take_step: Callable[[], None]
) -> list[Prompt]:
    """Load back and publish the cached part of each prompt; return all parts that could be published.

    A part cannot be published if the device lacks free pages or a copy fails.
    """
    found = [
        (namespace, tokens[: TOKEN_BYTES * match.host_tokens])
        for namespace, tokens in dict.fromkeys(prompts)
        if (match := ask("match", caches, lambda c: c.match(tokens, namespace))).host_tokens  # noqa: B023
    ]
    return [each for each in found if _serve(caches, each, take_step)]


def _serve(caches: Sequence[Cache], prompt: Prompt, take_step: Callable[[], None]) -> bool:
    namespace, tokens = prompt
    length, name = len(tokens) // TOKEN_BYTES, "again"

    def admit(cache: Cache) -> Admission | Wait:
        return cache.load_back(name, tokens, namespace, reserve_tokens=length)

    def state(cache: Cache) -> LoadState:
        return cache.load_state(name)

    # Retry once after a step, because under write-back evicted pages are free only after their backup.
    answer = ask("load_back", caches, admit)
    if isinstance(answer, Wait):
        take_step()
        answer = ask("load_back", caches, admit)
    done = False
    if not isinstance(answer, Wait) and answer.cached_tokens == length:
        while ask("load_state", caches, state) is LoadState.LOADING:
            take_step()
        done = ask("load_state", caches, state) is LoadState.READY
        if done:
            ask("insert", caches, lambda c: c.insert(name, tokens))
    ask("release", caches, lambda c: c.release(name))
    return done
