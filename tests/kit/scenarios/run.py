"""Runs a scenario: engine commands on the replicas, and rounds over the ranks' ballots."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from lockstep.coordinator.collective import Vector
from lockstep.coordinator.lanes import BallotShape, LaneLayout, disagreements, fold, read_header
from lockstep.coordinator.verdict import Verdicts, unhealthy_rank
from lockstep.errors import UsageError
from lockstep.ranks.protocol.config import NamespaceLimit
from lockstep.ranks.protocol.effects import NOTHING, Effects
from lockstep.ranks.replica.check import check
from lockstep.ranks.replica.replica import Replica
from lockstep.ranks.replica.tree.node import DEVICE
from lockstep.ranks.replica.tree.page_allocator import TIERS
from tests.kit.scenarios.language import PAGE_TOKENS, Names, Scenario, Words, config_of
from tests.kit.scenarios.ranks import InProcessRank, Rank
from tests.kit.scenarios.text import Writer, pages_text

T = TypeVar("T")
Command = Callable[[Replica, Words], tuple[object, Effects]]
Question = Callable[[Replica, Words], str]

_SETTLED_AFTER = 20

MakeRank = Callable[[int, BallotShape], Rank]


def _pools(replica: Replica) -> list[str]:
    return [each.pool for each in replica.prefixes.components]


def _limit(words: Words) -> NamespaceLimit:
    """Return a command's `NamespaceLimit`. An argument that is missing means no limit."""
    named = words.named
    return NamespaceLimit(
        namespace=words.name,
        device_pages=int(named["device"]) if "device" in named else None,
        host_pages=int(named["host"]) if "host" in named else None,
        ttl_s=int(named["ttl_ms"]) / 1000 if "ttl_ms" in named else None,
    )


_COMMANDS: Mapping[str, Command] = {
    "prefetch": lambda r, w: r.prefetch(
        w.name,
        w.namespace,
        w.prompt,
        w.named.get("source", ""),
    ),
    "load_back": lambda r, w: r.load_back(
        w.name, w.namespace, w.prompt, w.number("reserve"), w.number("priority")
    ),
    "extend": lambda r, w: r.extend(w.name, w.number("total")),
    "insert": lambda r, w: r.insert(w.name, w.prompt, final=w.named.get("final") != "no"),
    "retract": lambda r, w: r.retract(w.name, w.prompt),
    "resume": lambda r, w: r.resume(w.name, w.number("reserve")),
    "serve": lambda r, w: r.serve(w.name, w.prompt, w.number("ttl_ms", 60_000)),
    "release": lambda r, w: r.release(w.name),
    "pin": lambda r, w: r.pin(w.name, w.namespace, w.prompt, w.number("ttl_ms", 60_000)),
    "unpin": lambda r, w: r.unpin(w.name),
    "hit": lambda r, w: r.match_host(w.name, w.namespace, w.prompt, w.number("device")),
    "load": lambda r, w: r.load(w.name, w.prompt, w.number("from"), w.runs(_pools(r))),
    "back_up": lambda r, w: r.back_up(w.name, w.namespace, w.prompt, w.runs(_pools(r))),
    "fence": lambda r, w: r.fence(w.name),
    "retract_lent": lambda r, w: r.retract_lent(w.name, w.prompt, w.runs(_pools(r))),
    "resume_lent": lambda r, w: r.resume_lent(w.name, w.runs(_pools(r)), w.number("from")),
    "drop": lambda r, w: r.drop(None if w.name == "*" else w.name),
    "limit": lambda r, w: r.limit(_limit(w)),
    "reset": lambda r, w: r.reset(w.named.get("version")),
}


def _match(replica: Replica, words: Words) -> str:
    device, host, last_host = replica.match(words.namespace, words.prompt)
    return f"device {device}, device and host {host}, full attention on the host {last_host}"


def _free(replica: Replica, _: Words) -> str:
    pools = replica.prefixes.allocator.pools
    return "; ".join(
        f"{'device' if tier == DEVICE else 'host'}: "
        + ", ".join(
            f"{name} {pool.free} of {pool.capacity}"
            for name, pool in zip(_pools(replica), pools[tier], strict=True)
        )
        for tier in TIERS
        if tier != DEVICE or replica.config.device_pages
    )


def _table(replica: Replica, words: Words) -> str:
    return "; ".join(
        f"{pool} {pages_text(replica.page_table(words.name, pool))}" for pool in _pools(replica)
    )


_QUESTIONS: Mapping[str, Question] = {
    "match": _match,
    "free": _free,
    "table": _table,
    "state": lambda r, w: r.load_state(w.name).value,
    "store": lambda r, _: r.store_state.value,
    "nodes": lambda r, _: str(
        sum(1 for node in r.prefixes.tree.nodes() if node.parent is not None)
    ),
    "done": lambda r, w: "yes" if r.prefetch_done(w.name) else "no",
}
"""Queries that do not change the replica. The keys are the names of the queries in scenarios."""


class Run:
    """A running scenario, with one replica for all ranks or one replica for each rank.

    If every rank has a replica, all replicas must stay equal.
    """

    def __init__(self, scenario: Scenario, make_rank: MakeRank, *, one_replica: bool) -> None:
        config = config_of(scenario.settings)
        world_size = int(scenario.settings.get("ranks", 2))
        shape = BallotShape(world_size=world_size, prefetch_slots=config.bounds.prefetches)
        self._ranks = [make_rank(rank, shape) for rank in range(world_size)]
        self._replicas = [Replica(config) for _ in range(1 if one_replica else world_size)]
        self._depth = int(scenario.settings.get("depth", 0))
        self._names = Names(scenario)
        self._write = Writer(self._names)
        self._verdicts = Verdicts(shape)
        self._rounds = -1
        self._pending: tuple[LaneLayout, Vector] | None = None
        # Run a first round here and discard its output: a round prints the lanes whose value has
        # changed, and in the first round this is every lane.
        assert self._apply(self._launch())

    def block(self, lines: Sequence[str]) -> list[str]:
        """Execute the lines of a block; return the output lines."""
        output: list[str] = []
        for line in lines:
            if line.startswith(("rank ", "all ranks: ")):
                self._report(*line.split(": ", 1))
            elif line == "step":
                output += self._step()
            elif line == "settle":
                output += self._settle()
            elif line.startswith("compute "):
                output += self._compute(Words.of(line.split()[1:]))
            elif not line.startswith("#"):
                output += self._command(line)
        for replica in self._replicas:
            check(replica)
        assert len({each.digest for each in self._replicas}) == 1
        return output

    def _report(self, whose: str, report: str) -> None:
        ranks = self._ranks if whose == "all ranks" else [self._ranks[int(whose.split()[1])]]
        for rank in ranks:
            rank.hear(report)

    def _command(self, line: str) -> list[str]:
        verb, *rest = line.split()
        words = Words.of(rest)
        self._names.learn(self._replicas[0].requests.place(words.namespace))
        if verb in _QUESTIONS:
            return [f"answer: {self._every(lambda replica: _QUESTIONS[verb](replica, words))}"]
        try:
            answer, effects = self._every(lambda replica: _COMMANDS[verb](replica, words))
        except UsageError as error:
            return [f"refused: {error}"]
        return [*self._write.answer(answer), *self._follow(effects)]

    def _settle(self) -> list[str]:
        """Complete all ordered I/O successfully and step until idle; omit the output of these steps."""
        for _ in range(_SETTLED_AFTER):
            self._report("all ranks", "all well")
            self._step()
            if self._replicas[0].idle:
                return ["answer: nothing is in flight"]
        raise AssertionError(f"something is in flight after {_SETTLED_AFTER} rounds")

    def _compute(self, words: Words) -> list[str]:
        """Compute, insert and release a request; then match its prompt, and return the output."""
        name, place, prompt = words.name, f"in={words.namespace}", words.places[-1]
        pages = f"0-{len(prompt) - 1}"
        if self._replicas[0].config.device_pages:
            tokens = PAGE_TOKENS * len(prompt)
            self._command(f"load_back {name} {place} reserve={tokens} {prompt}")
            self._settle()
            self._command(f"insert {name} {prompt}")
        else:
            lent = f"kv={pages} window={pages} state=0"
            self._command(f"back_up {name} {place} {lent} {prompt}")
        self._settle()
        self._command(f"release {name}")
        return self._command(f"match {place} {prompt}")

    def _step(self) -> list[str]:
        if not self._depth:
            return self._apply(self._launch())
        output = [] if self._pending is None else self._apply(self._pending)
        self._pending = self._launch()
        return output or ["nothing to apply yet"]

    def _launch(self) -> tuple[LaneLayout, Vector]:
        """Collect and fold the ballots of all ranks."""
        self._rounds += 1
        per_rank = self._replicas if len(self._replicas) > 1 else self._replicas * len(self._ranks)
        layouts = [
            LaneLayout(
                epoch=1,
                round=self._rounds,
                state_digest=each.digest,
                prefetch_slots=each.prefetch_slots(),
            )
            for each in per_rank
        ]
        votes = [rank.vote(each) for rank, each in zip(self._ranks, layouts, strict=True)]
        return layouts[0], fold(votes)

    def _apply(self, voted: tuple[LaneLayout, Vector]) -> list[str]:
        layout, folded = voted
        assert disagreements(read_header(folded.data)) == ()
        unhealthy = unhealthy_rank(read_header(folded.data))
        if unhealthy is not None:
            return [f"the epoch ends: rank {unhealthy} cannot continue"]
        verdict = self._verdicts.read(layout, folded)
        effects = self._every(lambda replica: replica.apply(verdict))
        output = [*self._write.verdict(verdict), *self._follow(effects)]
        return [*output, *self._hear(effects.requests)]

    def _hear(self, through: int) -> list[str]:
        """Commit messages up to number `through`. All ranks must have received the same messages."""
        output: list[str] = []
        for number in range(self._replicas[0].messages.committed + 1, through + 1):
            contents = [rank.read(number) for rank in self._ranks]
            assert len(set(contents)) == 1, contents
            for replica, content in zip(self._replicas, contents, strict=False):
                assert replica.commit_message(number, content) == (None, NOTHING)
            output.append(f"message {number}: {contents[0].decode()}")
        return output

    def _follow(self, effects: Effects) -> list[str]:
        for rank in self._ranks:
            rank.follow(effects.expectations, effects.orders)
        return list(self._write.effects(effects))

    def _every(self, ask: Callable[[Replica], T]) -> T:
        """Run `ask` on every replica; check that all results are equal, and return the result."""
        results: list[T] = []
        refused: list[UsageError] = []
        for replica in self._replicas:
            try:
                results.append(ask(replica))
            except UsageError as error:
                refused.append(error)
        if refused:
            assert [str(each) for each in refused] == [str(refused[0])] * len(self._replicas)
            raise refused[0]
        assert all(each == results[0] for each in results), results
        return results[0]


def run(scenario: Scenario, make_rank: MakeRank, *, one_replica: bool) -> str:
    """Run a scenario; return the scenario file with the actual output."""
    running = Run(scenario, make_rank, one_replica=one_replica)
    return scenario.written([running.block(block.lines) for block in scenario.blocks])


def run_here(scenario: Scenario) -> str:
    """Run a scenario in this process, with one replica, ballot and executor for each rank."""
    return run(scenario, InProcessRank, one_replica=False)
