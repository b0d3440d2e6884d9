"""What a checker has found, in one sentence for a reader who does not know the code."""

import re
from collections.abc import Callable

_POOLS = {"kv": "attention KV", "window": "sliding-window KV", "state": "recurrent state"}
_TIERS = {"host": "host memory", "device": "device memory"}
_CRASHES = {
    ("loading_back.py", "begin"): "to load a cached prefix back from host memory, and some of its"
    " pages are not there any more",
    (
        "tree.py",
        "keys",
    ): "to name the pages of a cached prefix, and found the entry deleted from the"
    " cache while it was still in use",
}
"""By module and function: what the cache was about to do when it raised."""

_STATES = {"draining": "being detached", "attaching": "being attached"}
_INVARIANTS = {
    "1": "The cache has lost track of which of its entries continues which",
    "2": "The cache keeps an entry that nothing is cached under and nothing uses",
    "3": "The cache keeps the window or state of a prefix of which it has dropped the KV",
    "4": "The cache keeps the end of a prefix of which it has dropped the beginning",
    "5": "The cache has lost count of who uses what it keeps, so it may delete what is in use",
    "6": "The cache has lost count of what it keeps and of what may be evicted",
    "7": "A page of memory belongs to two owners, or to none",
    "8": "A transfer is using a cached prefix that was deleted or changed under it",
    "9": "The cache has lost count of the transfers under way, so it will refuse others for ever",
}
"""By number, as `docs/architecture.md` has them."""


def in_plain_words(what: str) -> str:
    """Return one sentence that says what broke, for a violation in a checker's words."""
    for pattern, say in _SENTENCES:
        match = pattern.search(what)
        if match is not None:
            return say(match)
    return f"Something that must always hold did not: {what}."


def _memory(tier: str, pool: str | None) -> str:
    where = _TIERS.get(tier, tier)
    return f"{where} ({_POOLS.get(pool, pool)})" if pool else where


def _held(content: str) -> str:
    known = {
        "nothing": "nothing",
        "garbage": "what a failed transfer has left in it",
        "a half-written page": "what a transfer has written of it so far",
    }
    return known.get(content, "the data of another prefix")


def _then(content: str) -> str:
    if content == "nothing":
        return "without what it needs"
    return "from wrong data"


def _owner(name: str) -> str:
    kind, _, rest = name.partition(" ")
    return {
        "the": "the list of free pages",
        "node": "a cached prefix",
        "operation": "a transfer under way",
        "request": f"request {rest}",
    }.get(kind, name)


def _offers(found: re.Match[str]) -> str:
    rank, tier, pool, page, holds = found.groups()
    return (
        f"On rank {rank} the cache offers page {page} of {_memory(tier, pool)} as part of a cached"
        f" prefix, and the page holds {_held(holds)}: the next request with that prefix would go on"
        f" {_then(holds)}."
    )


def _still_written(found: re.Match[str]) -> str:
    rank, tier, pool, page = found.groups()
    return (
        f"On rank {rank} the cache offers page {page} of {_memory(tier, pool)} as part of a cached"
        " prefix while a transfer still writes it."
    )


def _request_reads(found: re.Match[str]) -> str:
    rank, request, tier, pool, page, holds = found.groups()
    return (
        f"On rank {rank} request {request} was given page {page} of {_memory(tier, pool)} as its own,"
        f" and the page holds {_held(holds)}: it would go on {_then(holds)}."
    )


def _page_of_request(found: re.Match[str]) -> str:
    rank, tier, pool, page, holds = found.groups()
    return (
        f"On rank {rank} a running request's page {page} of {_memory(tier, pool)} holds"
        f" {_held(holds)}: it goes on {_then(holds)}."
    )


def _two_transfers(found: re.Match[str]) -> str:
    verb, tier, pool, page, other = found.groups()
    return (
        f"Two transfers use page {page} of {_memory(tier, pool)} at the same time: one {verb} it while"
        f" another still {other}s it, so one of them moves wrong data."
    )


def _copies(found: re.Match[str]) -> str:
    tier, pool, page, holds = found.groups()
    return (
        f"The cache copies page {page} of {_memory(tier, pool)} for a request, and the page holds"
        f" {_held(holds)}: the request would go on {_then(holds)}."
    )


def _two_owners(found: re.Match[str]) -> str:
    tier, pool, page, one, other = found.groups()
    if _owner(one) == _owner(other) == "a cached prefix":
        owners = "two cached prefixes"
    else:
        owners = " and ".join(sorted((_owner(one), _owner(other)), key=len))
    return (
        f"Page {page} of {_memory(tier, pool)} belongs to {owners} at once, so one would be overwritten"
        " with the data of the other."
    )


def _miscounted_users(found: re.Match[str]) -> str:
    where = next((name for tier, name in _TIERS.items() if tier in found.string), "the cache")
    if int(found[1]) > int(found[2]):
        return (
            f"A cached prefix in {where} counts as in use, and nothing can let go of it any more, as"
            " when an entry is deleted from the cache while a transfer is using it: its memory is"
            " never given back."
        )
    return (
        f"A cached prefix in {where} is in use and does not count as such, so it can be deleted under"
        " whoever uses it."
    )


def _invariant(found: re.Match[str]) -> str:
    return f"{_INVARIANTS.get(found[1], 'The cache has broken one of its own rules')}."


def _deleted(found: re.Match[str]) -> str:
    kind = {
        "PREFETCH": "A transfer from storage",
        "BACKUP": "A copy to host memory",
        "LOAD_BACK": "A copy to the device",
        "PERSIST": "A write to storage",
    }.get(found[1], "A transfer")
    return f"{kind} is using a cached prefix that was deleted from the cache under it."


def _missed_the_vote(found: re.Match[str]) -> str:
    return (
        f"Rank {found[1]} did not come to the vote that every rank takes part in at every step, and"
        " the others waited for it until they gave up: the group hangs."
    )


def _no_vote(found: re.Match[str]) -> str:
    return (
        f"Rank {found[1]} took part in {found[2]} votes in one step where every rank must take part in"
        " exactly one: ranks that vote would wait for those that do not."
    )


def _differ(found: re.Match[str]) -> str:
    del found
    return (
        "The ranks no longer agree on what is cached and which pages are free: from here on they give"
        " the same request different pages."
    )


def _other_answers(found: re.Match[str]) -> str:
    return (
        f"Ranks 0 and {found[2]} gave different answers to the same call ({found[1]}), so they would"
        " go on with different work."
    )


def _table(found: re.Match[str]) -> str:
    return (
        f"Request {found[1]} is served without pages of {_POOLS.get(found[2], found[2])} that its next"
        " token has to read."
    )


def _never_ends(found: re.Match[str]) -> str:
    del found
    return "A transfer does not end although its time is up, so what waits for it waits for ever."


def _lost(found: re.Match[str]) -> str:
    count, tier, pool = found.groups()
    return f"{count} pages of {_memory(tier, pool)} belong to nobody, so nobody can use them again."


def _crashed(found: re.Match[str]) -> str:
    error, module, function, message = found.groups()
    doing = _CRASHES.get((module, function))
    if doing is not None:
        return f"The cache crashed on every rank: it was {doing}."
    said = f", saying: {message.rstrip('.')}" if message else ""
    return f"The cache crashed in {module} with {error}{said}."


def _closed_store(found: re.Match[str]) -> str:
    rank, who, store = found.groups()
    what = "transfer" if who == "operation" else who
    return (
        f"On rank {rank} a {what} uses the storage {store} after it was detached and closed there, so"
        " it may fail or reach something else."
    )


def _not_open(found: re.Match[str]) -> str:
    return (
        f"Rank {found[1]} begins to use storage that it has not opened yet, or while it still uses"
        " another one, so the ranks no longer read and write in the same place."
    )


def _other_stores(found: re.Match[str]) -> str:
    del found
    return (
        "The ranks no longer use the same storage, so one finds there what another does not, and they"
        " would go on with different work."
    )


def _agreed_store(found: re.Match[str]) -> str:
    state, used = _STATES.get(found[1], found[1]), found[2]
    if used == "None":
        return f"The ranks agree that storage is {state}, and none of them has any in use."
    return f"The ranks agree that storage is {state}, and they still have {used} in use."


def _unanswered(found: re.Match[str]) -> str:
    rank, change = found.groups()
    return (
        f"Rank {rank} was told to {change.lower()} storage, and neither does it nor says that it cannot"
        " although the time for it is up, so whoever asked waits for ever."
    )


def _kept_store(found: re.Match[str]) -> str:
    del found
    return (
        "Storage was to be detached and nothing uses it any more, but the ranks do not let go of it, so"
        " no other can ever be attached."
    )


def _left_waiting(found: re.Match[str]) -> str:
    return (
        f"Rank {found[1]} has left its group, and whoever told it to attach or detach storage still"
        " waits for an answer that cannot come any more."
    )


def _done_on_some(found: re.Match[str]) -> str:
    change, count = found.groups()
    return (
        f"Storage was {change.lower()}ed for only {count} of the ranks that were told to do so, where"
        " it must be all of them or none."
    )


def _done_untold(found: re.Match[str]) -> str:
    return f"Storage was {found[1].lower()}ed although not every rank had been told to do so."


_PROPOSAL = r"Proposal\(change=<Change\.(\w+): .*\)"
_PAGE = r"(host|device) (?:(\S+) )?page (\d+)"
_CONTENT = r"(nothing|garbage|a half-written page|content \d+)"
_SENTENCES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), say)
    for pattern, say in (
        (rf"rank (\d+): the tree offers {_PAGE} as .*, and it holds {_CONTENT}", _offers),
        (rf"rank (\d+): the tree offers {_PAGE}, which a transfer may still write", _still_written),
        (
            rf"rank (\d+), request (\S+): {_PAGE} at \d+ holds {_CONTENT} instead of",
            _request_reads,
        ),
        (
            rf"rank (\d+), request (\S+) continues {_PAGE}, which holds {_CONTENT} instead of",
            _request_reads,
        ),
        (rf"rank (\d+): {_PAGE} of a request holds {_CONTENT} instead of", _page_of_request),
        (rf"operation \d+ (writes|reads) {_PAGE} while .* still (read|write)", _two_transfers),
        (rf"copies {_PAGE}, which holds {_CONTENT}", _copies),
        (r"(host|device)(?: (\S+))? page (\d+) belongs to (.+) and to (.+)", _two_owners),
        (r"(\d+) (host|device)(?: (\S+))? pages belong to nobody", _lost),
        (r"is held (\d+) times\D+ (\d+) receipts", _miscounted_users),
        (r"(\w+) \d+ refers to node \d+, which is gone", _deleted),
        (r"CollectiveTimeout: rank (\d+) did not come", _missed_the_vote),
        (r"rank (\d+) reached (\d+) collectives in one step", _no_vote),
        (r"digests differ|the states differ|DivergenceError", _differ),
        (r"^(.+?): rank 0 answers .*, rank (\d+) answers", _other_answers),
        (r"request (\S+) has computed .* page table of pool '(\S+)'", _table),
        (r"stands in \w+ for .* is its limit", _never_ends),
        (
            r"rank (\d+): (?:an? )?(\w+)(?: \d+)? touches store (\S+), which was closed",
            _closed_store,
        ),
        (r"rank (\d+): a store is attached that is not open", _not_open),
        (r"the ranks have different stores", _other_stores),
        (r"the store is (\w+) on every rank, and they use (\S+)", _agreed_store),
        (rf"rank (\d+) was told: {_PROPOSAL}, and it does not end", _unanswered),
        (r"and the store is not let go of", _kept_store),
        (r"rank (\d+) has left its group, and a proposal waits", _left_waiting),
        (rf"{_PROPOSAL} was done on (\d+) of the ranks", _done_on_some),
        (rf"{_PROPOSAL} was done, and not every rank", _done_untold),
        (r"invariant (\d):", _invariant),
        (r"(\w+) at (\S+):\d+ in (\w+)(?:: )?(.*)", _crashed),
    )
)
