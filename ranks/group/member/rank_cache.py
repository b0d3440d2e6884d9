"""Commands common to `Cache` and `HostCache`: match, prefetch, serve, pins and the store."""

from concurrent.futures import Future

from ....coordinator.proposal import Change, Proposal
from ....errors import ConfigError, UsageError
from ...protocol.answers import Dropped
from ...protocol.config import TTL_S_MIN, NamespaceLimit
from ...protocol.renamed import former_name
from ...replica.tree.matching import Match
from ...replica.tree.tokens import Tokens, as_token_bytes, as_token_view
from .arguments import as_seconds, require_limit, require_source, require_text
from .group_rank import GroupRank


class RankCache(GroupRank):
    """The commands of both caches.

    `attach_store`, `detach_store` and `store_state` may be called from any thread at any time.
    """

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """Return how much of `tokens` is cached on device and host. Changes nothing.

        The match locks no pages, so a later admission may find fewer or more cached tokens.
        """
        require_text(namespace)
        return self._replica.match(namespace, as_token_view(tokens))

    def prefetch(
        self,
        request: str,
        tokens: Tokens,
        namespace: str = "",
        *,
        source: str = "",
    ) -> bool:
        """Start to read from storage the pages that extend the cached prefix of `tokens`.

        Returns False if there is nothing to read, no store, or the queue is full. In every case the
        cache keeps the request's name until `release` or `abort`. No device page is locked. The cached
        pages of `tokens` become the most recently used.

        `source` is the URI of another group that serves its host memory (its `serving_uri`); empty for
        the store. Pages that an earlier prefetch could not read from a group are requested again.
        """
        self._require_group()
        require_text(namespace)
        self._require_source(source)
        data = as_token_bytes(tokens)
        return self._follow(self._replica.prefetch(request, namespace, data, source))

    def serve(self, request: str, tokens: Tokens, *, ttl_s: float) -> int:
        """Serve a request's computed pages from host memory to other groups; return tokens served now.

        Serves the whole pages of `tokens`, and the window and state pages that a match of these pages
        needs. Call again after each step, because pages not in host memory yet are copied there first.
        Pages stay pinned and served on every rank until `release`, or until `ttl_s` seconds of agreed
        time have passed since the last call. No further pages are served if running requests would then
        lack host memory. Returns 0 if the request is not admitted.
        """
        self._require_group()
        if self.config.peers is None:
            raise UsageError("nothing can be served: set `peers` when the cache is opened")
        ttl_ms = _ttl_ms(ttl_s)
        return self._follow(self._replica.serve(request, as_token_bytes(tokens), ttl_ms))

    @property
    def serving_uri(self) -> str:
        """The `source` URI under which another group reads the pages served by this group.

        Any rank's URI works, because each page server lists the other ranks. Empty if `peers` is not
        set.
        """
        address = self._executor.serving_address()
        return f"peer://{address}" if address else ""

    def last_key(self, tokens: Tokens, namespace: str = "") -> bytes:
        """Return the key of the last whole page of `tokens`. Changes nothing."""
        require_text(namespace)
        return self._replica.last_key(namespace, as_token_bytes(tokens))

    def prefetch_done(self, request: str) -> bool:
        """Return whether the stop policy allows the engine to schedule the request now.

        True if the request has no prefetch, its prefetch has finished, or the policy is `best_effort`.
        """
        return self._replica.prefetch_done(request)

    def looks_up(self, request: str) -> bool:
        """Return whether the request's lookup in the store is in flight.

        False for a prefetch still in the queue. An idle engine should wait for the lookup, because most
        lookups take one step if nothing is found.
        """
        return self._replica.prefetching.looks_up(request)

    def attach_store(self, uri: str) -> "Future[None]":
        """Propose to attach a store, in the background; requests continue meanwhile.

        Call on every rank with the same URI (`{rank}` is replaced by the rank), in any order and at any
        time. Once the store is open on all ranks, all ranks use it from the same step on. The engine
        must keep stepping, so do not wait for the future in the engine's thread.

        The future fails with `StorageError` on every rank if:
        - one rank could not open the store,
        - one rank got another proposal, or none within `timeouts.open_s`,
        - another store is attached, or quarantined operations of old stores keep half of host memory.

        If the group or the cache ends first, the future fails with the error that ended it. Host pages
        cached before the attach are persisted when later pages of the same prefix are persisted.

        Raises `ConfigError` for an unknown scheme, wrapper or option; another package's scheme is
        checked only when the store is opened. Raises `UsageError` while another proposal is pending on
        this rank. Repeating the pending proposal returns its future.
        """
        require_text(uri, "a store's URI")
        if not self._replica.config.host_pages:
            raise ConfigError("a store needs host memory: set host_pages to 1 or more")
        return self._stage(Proposal(Change.ATTACH, uri))

    def detach_store(self) -> "Future[None]":
        """Propose to detach the store. Call on every rank, as for `attach_store`.

        The future completes once all ranks have agreed. From then on no storage operation starts.
        Operations in flight are aborted (`store_state` DRAINING), then the store is closed in the
        background. Another store may be proposed at any time.
        """
        return self._stage(Proposal(Change.DETACH))

    def pin(self, name: str, tokens: Tokens, namespace: str = "", *, ttl_s: float) -> int:
        """Pin the cached pages of `tokens` for `ttl_s` seconds of agreed time, or until `unpin`.

        Returns the number of pinned tokens. Returns 0 and pins nothing if nothing is cached or the pin
        would exceed `bounds.pinned_pages`. `name` must not be in use.
        """
        self._require_group()
        require_text(namespace)
        data, ttl_ms = as_token_bytes(tokens), _ttl_ms(ttl_s)
        return self._follow(self._replica.pin(name, namespace, data, ttl_ms))

    def unpin(self, name: str) -> bool:
        """Remove a pin; return False if there is no pin of that name or it has expired."""
        self._require_group()
        return self._follow(self._replica.unpin(name))

    def drop(self, namespace: str | None = None) -> Dropped:
        """Evict the unused pages of a namespace, or of all, from device and host, and remove its pins.

        Call this when a tenant leaves. Pages held by requests and operations stay cached until evicted,
        so call again after those have finished. Objects in storage stay, and requests can still
        prefetch them.
        """
        self._require_group()
        if namespace is not None:
            require_text(namespace)
        return self._follow(self._replica.drop(namespace))

    def limit(self, limit: NamespaceLimit) -> None:
        """Replace the limit of one namespace.

        Pages above the new limit are evicted in the next step. A limit without any bound removes the
        namespace's limit, so that the limit of `*`, if any, applies.
        """
        self._require_group()
        require_limit(limit)
        require_text(limit.namespace)
        self._follow(self._replica.limit(limit))

    def reset(self, weights_version: str | None = None) -> None:
        """Make all pages cached so far unmatchable for requests not yet admitted or loaded.

        Pins are removed. `weights_version` names the weights used from now on. Storage is read and
        written under that version, so caches that reset to the same version share pages. Without a
        version, page keys get a new random seed that no other cache has. Storage is then not used until
        a reset names a version. A restarted cache uses the configured `weights_version` again, and
        finds in storage the pages written before the first reset.

        Requests already admitted continue on their pages, which are not persisted any more. If the
        engine owns the device pages, this also holds for requests that have loaded or backed up. All
        other requests then count as new: the engine must not back up KV that it computed for them
        before the reset.
        """
        self._require_group()
        if weights_version is not None:
            require_text(weights_version, "a weights version")
        self._follow(self._replica.reset(weights_version))

    def digest_facts(self, *facts: object) -> None:
        """Add facts about the engine to the digest, to check that they are equal on every rank.

        If ranks differ, the next round ends the epoch and names the first fact that differs. Facts are
        text, bytes, 64-bit integers, numbers, booleans, None, and lists or tuples of these. Raises
        `UsageError` for values without an encoding that is equal in every process.
        """
        self._home.require_here()
        self._follow(self._replica.digest_facts(*facts))

    def _require_source(self, source: str) -> None:
        require_source(source)
        if source and self.config.peers is None:
            raise UsageError(
                "nothing can be read from another group: set `peers` when the cache is opened"
            )

    def _stage(self, proposal: Proposal) -> "Future[None]":
        self._home.require_here()
        return self._staging.stage(proposal)

    witness = former_name("witness", digest_facts)
    obey = former_name("obey", GroupRank.set_control_handler)


def _ttl_ms(ttl_s: float) -> int:
    return int(as_seconds(ttl_s, "ttl_s", TTL_S_MIN) * 1000)
