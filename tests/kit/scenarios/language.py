"""The language of scenarios: what a file says, and what its words mean.

    # Its title, as a claim, and what a reader should know beside.
    settings: ranks=2 host=16

    rank 0: answered 12          what a rank's executor reports, any number of them
    step                         one command of the engine, or `step`
    ----
    verdict 3: ...               what came out

A letter in a prompt stands for one page of tokens, and `+2` for so many tokens of a page that is not
full: `ABC+2` shares two pages with `ABX`. Page numbers are written as `0-3,7`, with `_` for a page that
is not there. Clocks say 1000 ms, which a first round has agreed on, before anything else happens.

Two commands leave out what a reader need not see: `compute w ABCD` lets a request compute a prompt and
leave, and `settle` lets all that was ordered end well on every rank.

After `all ranks: inbox`, messages reach ranks by their numbers: `rank 1: message 2 withdrawn r7`. What
came out says up to which number every rank has them, and each that is a command from then on.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.coordinator.proposal import Change, Proposal
from lockstep.coordinator.stop_policy import StopPolicy, StopRule
from lockstep.ranks.protocol.config import Bounds, NamespaceLimit, Timeouts, WritePolicy
from lockstep.ranks.protocol.replica_config import ComponentSettings, ReplicaConfig
from lockstep.ranks.replica.core.pages import PageRun, page_run
from lockstep.ranks.replica.operations.lent import NO_PAGE
from lockstep.ranks.replica.tree.node import Place
from lockstep.ranks.replica.tree.tokens import as_token_bytes, namespace_seed, page_keys

T = TypeVar("T")

PAGE_TOKENS = 4
MODEL = b"model"
_RULE = "----"
_PROMPT = re.compile(r"([A-Z]+)?(?:\+([1-3]))?")

_NAMED = (
    *("in", "reserve", "priority", "total", "final", "ttl_ms", "device", "from", "version"),
    *("kv", "window", "state", "source", "host"),
)
_SETTINGS = (
    *("ranks", "depth", "device", "engine", "host", "store", "window", "state", "write_policy"),
    *("eviction", "names_pages", "limit", "bounds", "timeouts", "stop"),
)
"""Before the first dot, where there is one."""


@dataclass(frozen=True, slots=True)
class Block:
    """Reports and a command, and what came out by the file."""

    lines: tuple[str, ...]
    """As they stand in the file, with remarks."""
    told: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a file says."""

    head: str
    """Its title and settings, as they stand in the file."""
    settings: Mapping[str, str]
    blocks: tuple[Block, ...]

    def written(self, told: Sequence[Sequence[str]]) -> str:
        """Return the file as it should be if this is what came out of its blocks."""
        parts = [self.head]
        for block, lines in zip(self.blocks, told, strict=True):
            parts.append("\n".join((*block.lines, _RULE, *lines)))
        return "\n\n".join(parts) + "\n"


def parse(text: str) -> Scenario:
    """Read a file. Raises `ValueError` for what is none."""
    head, *blocks = text.strip().split("\n\n")
    *title, settings = head.splitlines()
    if not title or not settings.startswith("settings:") or any(t[:2] != "# " for t in title):
        raise ValueError("a scenario begins with a title, and then its settings")
    pairs = dict(word.split("=", 1) for word in settings.split()[1:])
    return Scenario(head, pairs, tuple(_block(each) for each in blocks))


def _block(text: str) -> Block:
    lines = text.strip().splitlines()
    at = lines.index(_RULE) if _RULE in lines else len(lines)
    return Block(tuple(lines[:at]), tuple(lines[at + 1 :]))


def tokens_of(prompt: str) -> bytes:
    """Return the tokens that a prompt stands for."""
    match = _PROMPT.fullmatch(prompt)
    if match is None or not prompt:
        raise ValueError(
            f"{prompt!r} is no prompt; write pages as letters, and +1 to +3 tokens more"
        )
    whole, begun = match[1] or "", int(match[2] or 0)
    tokens = [100 * ord(page) + index for page in whole for index in range(PAGE_TOKENS)]
    return as_token_bytes(tokens + list(range(begun)))


def pages_of(text: str) -> PageRun:
    """Return the page numbers that `0-3,7` or `_,_,4` stands for."""
    pages: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        pages += [NO_PAGE] if part == "_" else range(int(first), int(last or first) + 1)
    return page_run(pages)


def proposal_of(words: str) -> Proposal:
    """Return what `attach memory://b` or `detach` proposes."""
    change, _, store = words.partition(" ")
    return Proposal(Change[change.upper()], store)


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a command behind its name: some by their place, some as `name=value`."""

    places: tuple[str, ...]
    named: Mapping[str, str]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Words":
        """Sort words by their kind. Raises `ValueError` for a name that no command knows."""
        named = dict(word.split("=", 1) for word in words if "=" in word)
        _require_known(named, _NAMED)
        return cls(tuple(word for word in words if "=" not in word), named)

    @property
    def name(self) -> str:
        """The request or the pin."""
        return self.places[0]

    @property
    def prompt(self) -> bytes:
        """The tokens, which come last."""
        return tokens_of(self.places[-1])

    @property
    def namespace(self) -> str:
        return self.named.get("in", "")

    def number(self, name: str, default: int = 0) -> int:
        return int(self.named.get(name, default))

    def runs(self, pools: Sequence[str]) -> list[PageRun]:
        """Return the pages that are lent, by pool."""
        return [pages_of(self.named.get(pool, "")) for pool in pools]


class Names:
    """Names for what has numbers that nobody can read: the keys of pages, and proposals."""

    def __init__(self, scenario: Scenario) -> None:
        words = [word for block in scenario.blocks for line in block.lines for word in line.split()]
        found = [_PROMPT.fullmatch(word) for word in words]
        prompts = [match for match in found if match is not None and match[0]]
        self._prompts = {match[1] for match in prompts if match[1]}
        lines = [line for block in scenario.blocks for line in block.lines]
        staged = {line.partition(" staged ")[2] for line in lines if " staged " in line}
        self.proposals = {proposal_of(each).digest: each for each in staged}
        self._pages: dict[bytes, tuple[str, str]] = {}
        """By key: what stands before the page's letter, and the letter."""

    def learn(self, place: Place) -> None:
        """Know the keys of all prompts in a place."""
        namespace, generation, version = place
        era = f"@{version}" if version is not None else f"@{generation}" if generation else ""
        start = f"{namespace}{era}/" if namespace or era else ""
        seed = namespace_seed(MODEL, namespace, generation, b"", version)
        self._pages[seed] = start, "root"
        for prompt in self._prompts:
            keys = page_keys(seed, tokens_of(prompt), PAGE_TOKENS)
            for index, key in enumerate(keys):
                self._pages[key] = start + prompt[:index], prompt[index]

    def keys(self, keys: Sequence[bytes]) -> str:
        """Name keys: `AB.CD` for those of the pages C and D after A and B, `_` for one left out."""
        parts: list[str] = []
        after = None
        for key in keys:
            before, page = self._pages[key] if key else (after, "_")
            if before == after:
                parts[-1] += page
            else:
                parts.append(
                    f"{before}.{page}" if before and before[-1] != "/" else f"{before or ''}{page}"
                )
            after = (before or "") + page
        return " ".join(parts)


def config_of(settings: Mapping[str, str]) -> ReplicaConfig:
    """Return the replica's settings. Small pools, so that page numbers can be followed."""
    _require_known([name.partition(".")[0] for name in settings], _SETTINGS)
    components = tuple(
        ComponentSettings(
            kind=kind,
            pool=pool,
            device_pages=0
            if settings.get("device") == "0"
            else int(_of(settings, pool, "device", 16)),
            host_pages=int(_of(settings, pool, "host", 16)),
            every_pages=int(settings[pool]),
        )
        for pool, kind in (("window", "sliding_window"), ("state", "recurrent"))
        if pool in settings
    )
    limits: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name.startswith("limit."):
            _, namespace, field = name.split(".")
            number: float = float(value) if field == "ttl_s" else int(value)
            limits.setdefault(namespace, {})[field] = number
    return ReplicaConfig(
        page_tokens=PAGE_TOKENS,
        device_pages=int(settings.get("device", 16)),
        engine_pages=int(settings.get("engine", 0)),
        host_pages=int(settings.get("host", 16)),
        components=components,
        has_store=settings.get("store") != "no",
        model_digest=MODEL,
        stop_policy=_part(StopPolicy, "stop", settings),
        write_policy=WritePolicy(settings.get("write_policy", "write_through")),
        eviction=settings.get("eviction", "lru"),
        limits=tuple(NamespaceLimit(namespace=name, **limit) for name, limit in limits.items()),
        names_pages="names_pages" in settings,
        bounds=_part(Bounds, "bounds", settings),
        timeouts=_part(Timeouts, "timeouts", settings),
    )


def _require_known(names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")


def _of(settings: Mapping[str, str], pool: str, tier: str, default: int) -> str:
    return settings.get(f"{pool}.{tier}", str(default))


def _part(kind: type[T], prefix: str, settings: Mapping[str, str]) -> T:
    """Return a dataclass of settings, of which some stand in a scenario as `prefix.name=value`."""
    given: dict[str, Any] = {}
    for name, value in settings.items():
        part, _, field = name.partition(".")
        if part == prefix:
            read = StopRule if field == "rule" else float if field.endswith("_s") else int
            given[field] = read(value)
    return kind(**given)
