"""Requests that are aborted in an engine of any kind of model, and what comes of them."""

from collections.abc import Sequence

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.requests import Answer, Request


def abort_beside_a_long_one(engine: RunningEngine) -> tuple[list[str], list[tuple[int, int]]]:
    """Let one request end, and abort one that waits and one that runs; then flush.

    Returns how each has finished, and of each rank the loads and backups that are not over.
    """
    long = Request(tokens=range(3, 303), output_tokens=120)
    waiting = Request(tokens=range(5, 205), output_tokens=120, abort_after=0)
    running = Request(tokens=range(7, 207), output_tokens=120, abort_after=3)
    answers = engine.generate([long, waiting, running])
    engine.flush()
    states = [each.state for each in engine.ranks()]
    return (
        [answer.finish for answer in answers],
        [(state["loading"], state["keeping"]) for state in states],
    )


def answers_after_aborts(engine: RunningEngine, requests: Sequence[Request]) -> list[Answer]:
    """Abort requests that could be loaded as soon as they are sent; return what they are told later."""
    engine.generate(requests)
    engine.flush()
    engine.generate([Request(tokens=each.tokens, abort_after=0) for each in requests])
    engine.flush()
    return engine.generate(requests, together=False)
