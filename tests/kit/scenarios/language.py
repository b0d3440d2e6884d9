"""The scenario language: its syntax, and functions that convert its words to Python values.

    # The title, as a claim, and remarks for the reader.
    settings: ranks=2 host=16

    rank 0: answered 12          a report of a rank's executor; any number of reports
    step                         one command of the engine, or `step`
    ----
    verdict 3: ...               the expected output

In a prompt, a letter is one page of tokens, and `+2` is two tokens of a partial page: `ABC+2` shares
two pages with `ABX`. Page numbers are written as `0-3,7`, with `_` for a missing page. Each rank's
clock starts at 1000 ms. One round runs before the scenario, so this is also the agreed time.

Two commands are shorthands. `compute w ABCD` makes the request `w` compute the prompt `ABCD` and
finish. `settle` completes all ordered I/O successfully on every rank.

After the line `all ranks: inbox`, ranks can receive numbered messages, as in `rank 1: message 2
withdrawn r7`. The output shows the number up to which every rank has all messages, and each message
that became a command.
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
from lockstep.ranks.replica.tree.node import TreeIdentity
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
"""Names of the known settings. The parser checks only the part of a name before the first dot."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a scenario: executor reports, one command, and the expected output."""

    lines: tuple[str, ...]
    """Source lines of a block before its expected output, unchanged and including comments."""
    output: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario file after parsing."""

    head: str
    """The title and settings, unchanged."""
    settings: Mapping[str, str]
    blocks: tuple[Block, ...]

    def written(self, outputs: Sequence[Sequence[str]]) -> str:
        """Return the text of the scenario file, with each block's output taken from `outputs`."""
        parts = [self.head]
        for block, lines in zip(self.blocks, outputs, strict=True):
            parts.append("\n".join((*block.lines, _RULE, *lines)))
        return "\n\n".join(parts) + "\n"


def parse(text: str) -> Scenario:
    """Parse a scenario file. Raises `ValueError` if the text has no title or settings."""
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
    match = _PROMPT.fullmatch(prompt)
    if match is None or not prompt:
        raise ValueError(
            f"{prompt!r} is no prompt; write pages as letters, and +1 to +3 tokens more"
        )
    whole, begun = match[1] or "", int(match[2] or 0)
    tokens = [100 * ord(page) + index for page in whole for index in range(PAGE_TOKENS)]
    return as_token_bytes(tokens + list(range(begun)))


def pages_of(text: str) -> PageRun:
    """Return the page numbers that text like `0-3,7` or `_,_,4` represents."""
    pages: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        pages += [NO_PAGE] if part == "_" else range(int(first), int(last or first) + 1)
    return page_run(pages)


def proposal_of(words: str) -> Proposal:
    """Return the proposal for words such as `attach memory://b` or `detach`."""
    change, _, store = words.partition(" ")
    return Proposal(Change[change.upper()], store)


@dataclass(frozen=True, slots=True)
class Words:
    """The arguments of a command: positional ones, and `name=value` ones."""

    places: tuple[str, ...]
    named: Mapping[str, str]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Words":
        """Split words into positional and named arguments. Raises `ValueError` for an unknown name."""
        named = dict(word.split("=", 1) for word in words if "=" in word)
        _require_known(named, _NAMED)
        return cls(tuple(word for word in words if "=" not in word), named)

    @property
    def name(self) -> str:
        """Return the first argument, the name of a request or pin."""
        return self.places[0]

    @property
    def prompt(self) -> bytes:
        """Return the tokens of the prompt, the last positional argument."""
        return tokens_of(self.places[-1])

    @property
    def namespace(self) -> str:
        return self.named.get("in", "")

    def number(self, name: str, default: int = 0) -> int:
        return int(self.named.get(name, default))

    def runs(self, pools: Sequence[str]) -> list[PageRun]:
        """Return, for each pool, the device pages that the engine lends, as named in the arguments."""
        return [pages_of(self.named.get(pool, "")) for pool in pools]


class Names:
    """Maps page keys and proposal digests to the readable names that a scenario's output shows."""

    def __init__(self, scenario: Scenario) -> None:
        words = [word for block in scenario.blocks for line in block.lines for word in line.split()]
        found = [_PROMPT.fullmatch(word) for word in words]
        prompts = [match for match in found if match is not None and match[0]]
        self._prompts = {match[1] for match in prompts if match[1]}
        lines = [line for block in scenario.blocks for line in block.lines]
        staged = {line.partition(" staged ")[2] for line in lines if " staged " in line}
        self.proposals = {proposal_of(each).digest: each for each in staged}
        self._pages: dict[bytes, tuple[str, str]] = {}
        """For each page key: the name of the preceding pages, and the letter of the page."""

    def learn(self, place: TreeIdentity) -> None:
        """Compute the page keys of the scenario's prompts in a namespace, and remember their names."""
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
        """Return the names of page keys.

        `AB.CD` stands for pages C and D, which follow pages A and B. `_` stands for a missing key.
        """
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
    """Return the replica's configuration, with small pools whose page numbers are easy to follow."""
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
    """Return a dataclass of type `kind`; the settings `prefix.name=value` give its fields."""
    given: dict[str, Any] = {}
    for name, value in settings.items():
        part, _, field = name.partition(".")
        if part == prefix:
            read = StopRule if field == "rule" else float if field.endswith("_s") else int
            given[field] = read(value)
    return kind(**given)
