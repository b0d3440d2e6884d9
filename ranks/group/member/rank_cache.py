"""The common part of both caches of a rank: match, prefetch, serving, pins and the store.

They differ in who owns the device pages: a `cache.Cache` does, and under a `host_cache.HostCache` the
engine does.
"""

from concurrent.futures import Future

from ....coordinator.proposal import Change, Proposal
from ....errors import ConfigError, UsageError
from ...protocol.answers import Dropped
from ...protocol.config import TTL_S_MIN, NamespaceLimit
from ...replica.tree.matching import Match
from ...replica.tree.tokens import Tokens, as_token_bytes, as_token_view
from .arguments import as_seconds, require_limit, require_source, require_text
from .member import Member


class RankCache(Member):
    """The commands of both caches.

    `attach_store`, `detach_store` and `store_state` are for any thread, at any time.
    """

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """Return how much of `tokens` is cached on device and host. Changes nothing.

        Nothing is held by it either: by the time of an admission there may be less, or more.
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
        """Begin to bring from storage what would lengthen the cached part of `tokens`.

        Returns False if there is nothing to bring, no store, or no more room to wait. The request is
        known from here on; `release` or `abort` forgets it. Nothing is held on the device. What is
        cached of `tokens` counts as used now, so that it leaves after what nobody waits for.

        `source` is the URI of another group that serves its host memory, as its `serving_uri` says;
        empty for the store. What could not be read from a group before is asked for again.
        """
        self._require_group()
        require_text(namespace)
        self._require_source(source)
        data = as_token_bytes(tokens)
        return self._follow(self._replica.prefetch(request, namespace, data, source))

    def serve(self, request: str, tokens: Tokens, *, ttl_s: float) -> int:
        """Let other groups read what a request has computed out of host memory; return how much by now.

        Of the whole pages in `tokens`, and of windows and states what a match at their end needs. Ask
        again after each step: what is not in host memory yet is copied there. Every rank's host pages
        are pinned, and its page server answers readers, until `release`, or until nobody has called
        this for `ttl_s` seconds of agreed time. It grows no further while host memory would be short
        for the requests that compute. 0 for a request that is not admitted.
        """
        self._require_group()
        if self.config.peers is None:
            raise UsageError("nothing can be served: set `peers` when the cache is opened")
        ttl_ms = _ttl_ms(ttl_s)
        return self._follow(self._replica.serve(request, as_token_bytes(tokens), ttl_ms))

    @property
    def serving_uri(self) -> str:
        """The `source` by which another group reads what is served, of this rank's place in its own.

        Any rank's will do: it tells readers of the others. Empty where `peers` is not set.
        """
        address = self._executor.serving_address()
        return f"peer://{address}" if address else ""

    def last_key(self, tokens: Tokens, namespace: str = "") -> bytes:
        """Return the key of the last whole page of `tokens`. Changes nothing."""
        require_text(namespace)
        return self._replica.last_key(namespace, as_token_bytes(tokens))

    def prefetch_done(self, request: str) -> bool:
        """Say whether the stop policy lets the engine schedule the request now.

        True if it has no prefetch, its prefetch has ended, or the policy is `best_effort`.
        """
        return self._replica.prefetch_done(request)

    def looks_up(self, request: str) -> bool:
        """Say whether stores are still being asked what they have for the request.

        True only while its prefetch has its turn. A step may end that, and mostly does so where there
        is nothing: an engine without anything to compute had better wait for it than look elsewhere.
        """
        return self._replica.prefetching.looks_up(request)

    def attach_store(self, uri: str) -> "Future[None]":
        """Propose to use a store from now on; requests go on meanwhile.

        Tell every rank, with the same URI (`{rank}` in it stands for the rank), in any order and at any
        time: each opens the store in the background, and once it is open on all of them they use it
        from the same step on. So the engine must go on stepping; do not wait in its thread. The result
        is there once the store is attached. It is a `StorageError` where the proposal was withdrawn, on
        every rank: one could not open the store, one was told something else or nothing within
        `timeouts.open_s`, another store is attached, or stores of before hold on to half of host
        memory. Where the group or the cache ends first, it is the error that says so. What lies in host
        memory by then is written to the store with the next pages that continue it.

        Raises `ConfigError` for a URI that makes no sense: an unknown scheme, wrapper or option. What
        a scheme of another package makes of it shows only when the store is opened. Raises `UsageError`
        while another proposal is pending on this rank. Saying the same again joins what is pending.
        """
        require_text(uri, "a store's URI")
        if not self._replica.config.host_pages:
            raise ConfigError("a store needs host memory: set host_pages to 1 or more")
        return self._stage(Proposal(Change.ATTACH, uri))

    def detach_store(self) -> "Future[None]":
        """Propose to use the store no more; to be told to every rank, as for `attach_store`.

        The result is there once all ranks have agreed: from then on nothing is begun for the store.
        What is in flight is aborted, which `store_state` calls DRAINING; after it the store is closed
        in the background. Another one may be proposed at any time.
        """
        return self._stage(Proposal(Change.DETACH))

    def pin(self, name: str, tokens: Tokens, namespace: str = "", *, ttl_s: float) -> int:
        """Keep what is cached of `tokens` for `ttl_s` seconds of agreed time, or until `unpin`.

        Returns how many tokens are kept; 0, and there is no pin, where nothing is cached or
        `bounds.pinned_pages` would be passed. `name` must not be in use.
        """
        self._require_group()
        require_text(namespace)
        data, ttl_ms = as_token_bytes(tokens), _ttl_ms(ttl_s)
        return self._follow(self._replica.pin(name, namespace, data, ttl_ms))

    def unpin(self, name: str) -> bool:
        """Let go of what a pin keeps; False if there is none of that name, or its time is over."""
        self._require_group()
        return self._follow(self._replica.unpin(name))

    def drop(self, namespace: str | None = None) -> Dropped:
        """Evict what nobody holds of a namespace, or of all, from device and host; its pins end.

        For a tenant that leaves. What requests and operations hold stays cached until it is evicted,
        so drop again once they have ended. Storage keeps what it has, and requests find it there.
        """
        self._require_group()
        if namespace is not None:
            require_text(namespace)
        return self._follow(self._replica.drop(namespace))

    def limit(self, limit: NamespaceLimit) -> None:
        """Give a namespace another limit, in place of that which it had.

        What is beyond it leaves with the next step. One that bounds nothing takes the limit away, so
        that `*`, where that has one, is for this namespace too.
        """
        self._require_group()
        require_limit(limit)
        require_text(limit.namespace)
        self._follow(self._replica.limit(limit))

    def reset(self, weights_version: str | None = None) -> None:
        """Hide all that is cached now from every request that was not admitted, or has loaded, by now.

        Pins end. `weights_version` names the weights that are computed with from now on: storage is
        read and written under that name, and what it has is found by any cache that resets to the same
        name. Without one, keys begin anew that nobody has used or will use again, and storage is left
        alone until a reset names a version; after a restart it has what the configuration's
        `weights_version` had before the first reset. Requests that were admitted, or that have loaded
        or backed up where the engine owns the device, go on with what they have, and nothing of theirs
        goes to storage any more. One of an engine with pages of its own that has computed and done
        neither counts as not begun, so that engine must not let it back up what it has from before.
        """
        self._require_group()
        if weights_version is not None:
            require_text(weights_version, "a weights version")
        self._follow(self._replica.reset(weights_version))

    def witness(self, *facts: object) -> None:
        """Enter facts about the engine that must be the same on every rank into the digest.

        Ranks that differ in one are found in the next round, by name of the first that differs. Facts
        are text, bytes, integers of 64 bits, numbers, booleans, None, and lists or tuples of these:
        `UsageError` for what has no bytes that are the same in every process.
        """
        self._home.require_here()
        self._follow(self._replica.witness(*facts))

    def _require_source(self, source: str) -> None:
        require_source(source)
        if source and self.config.peers is None:
            raise UsageError(
                "nothing can be read from another group: set `peers` when the cache is opened"
            )

    def _stage(self, proposal: Proposal) -> "Future[None]":
        self._home.require_here()
        return self._staging.stage(proposal)


def _ttl_ms(ttl_s: float) -> int:
    return int(as_seconds(ttl_s, "ttl_s", TTL_S_MIN) * 1000)
