"""The built-in workload: conversations that share system prompts and grow turn by turn.

Requests have the same form as those of a trace (blocks of 512 tokens named by ids), so every reader of
traces accepts the workload. Turns of different conversations are interleaved, as in a real service.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .request import BLOCK_TOKENS, WorkloadRequest
from .trace import read_trace

REQUESTS_DEFAULT = 120

_SYSTEM_PROMPTS = 3
_SYSTEM_PROMPT_BLOCKS = 2
_CONVERSATIONS_AT_A_TIME = 6
_TURNS = (2, 6)
_TURN_TOKENS = (120, 900)
_OUTPUT_TOKENS = (8, 200)


@dataclass(slots=True)
class _Conversation:
    """A conversation that may continue: the ids of its blocks so far, and its length in tokens."""

    hash_ids: list[int]
    tokens: int
    turns_left: int


def synthetic_requests(seed: int, limit: int | None = None) -> Iterator[WorkloadRequest]:
    """Yield `limit` requests (default `REQUESTS_DEFAULT`). Equal seeds give equal requests."""
    draw = random.Random(seed)  # noqa: S311 - a workload must repeat; nothing here is secret.
    total = REQUESTS_DEFAULT if limit is None else limit
    next_id = _SYSTEM_PROMPTS * _SYSTEM_PROMPT_BLOCKS
    open_conversations: list[_Conversation] = []
    for index in range(total):
        while len(open_conversations) < _CONVERSATIONS_AT_A_TIME:
            open_conversations.append(_begin(draw))
        chosen = draw.randrange(len(open_conversations))
        conversation = open_conversations[chosen]
        conversation.tokens += draw.randint(*_TURN_TOKENS)
        while len(conversation.hash_ids) * BLOCK_TOKENS < conversation.tokens:
            conversation.hash_ids.append(next_id)
            next_id += 1
        yield WorkloadRequest(
            index=index,
            prompt_length=conversation.tokens,
            output_length=draw.randint(*_OUTPUT_TOKENS),
            hash_ids=tuple(conversation.hash_ids),
        )
        conversation.turns_left -= 1
        if not conversation.turns_left:
            del open_conversations[chosen]


def _begin(draw: random.Random) -> _Conversation:
    first = draw.randrange(_SYSTEM_PROMPTS) * _SYSTEM_PROMPT_BLOCKS
    return _Conversation(
        hash_ids=list(range(first, first + _SYSTEM_PROMPT_BLOCKS)),
        tokens=_SYSTEM_PROMPT_BLOCKS * BLOCK_TOKENS,
        turns_left=draw.randint(*_TURNS),
    )


def requests_of(trace: str | None, seed: int, limit: int | None) -> Iterator[WorkloadRequest]:
    """Yield the requests of the trace, or of the built-in workload if `trace` is None."""
    if trace is None:
        return synthetic_requests(seed, limit)
    return read_trace(trace, limit)


def spread_over(namespaces: int, requests: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Assign requests to `namespaces` namespaces in turn.

    With 1 the requests stay in the default namespace. With 0 each request gets its own namespace.
    """
    if namespaces == 1:
        return requests
    return (
        replace(each, namespace=f"tenant-{each.index % namespaces if namespaces else each.index}")
        for each in requests
    )


def count_requests(trace: str | None, limit: int | None) -> int:
    """Return the number of requests that `requests_of` yields for the same arguments.

    Raises `ConfigError` for a malformed trace.
    """
    if trace is None:
        return REQUESTS_DEFAULT if limit is None else limit
    return sum(1 for _ in read_trace(trace, limit))
