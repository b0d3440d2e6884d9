"""The cache that a user opens for a Transformers model, to reuse prefixes in `generate()`."""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.constants import HF_HOME
from transformers import __version__ as transformers_version

from ...coordinator.collectives.in_process import InProcessGroup
from ...errors import ConfigError, UsageError
from ...ranks.group.host_cache import HostCache
from ...ranks.protocol.config import HostCacheConfig
from ...ranks.protocol.orders import KV_POOL
from ...ranks.replica.operations.requests import LoadState
from ...storage_backends.uri import without_secrets
from ...telemetry.port import watch
from ..weights import FileDigests
from .forward_passes import ForwardPasses
from .generate_settings import GenerateSettings
from .kept_layers import SequencePages, kept_layers
from .kv_identity import configuration_digest, signature, weights_of
from .past import ReusedPast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("lockstep.transformers")


class LockstepCache:
    """Caches prefixes of one model in host memory and storage; one sequence can be in use at a time.

    Under tensor parallelism every rank makes the same calls in the same order. At the end of a `with`
    block the cache is closed. If the block raises an error, the cache is abandoned without waiting for
    other ranks.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        cache: HostCache,
        pages: SequencePages,
        settings: GenerateSettings,
    ) -> None:
        """Store the parts of a cache. Users call `open` instead."""
        self.cache = cache
        """The underlying `HostCache`, for statistics, `drop`, `attach_store` and other calls."""
        self._model = model
        self._pages = pages
        self._settings = settings
        self._signature = signature(model)
        self._names = count()
        self._in_use = False

    @classmethod
    def open(cls, model: "PreTrainedModel", **settings: Any) -> "LockstepCache":
        """Open a cache for a model with its current weights; every rank calls it at the same point.

        `settings` are those of `GenerateSettings`; `host_memory_gib` or `host_pages` is required.
        Raises `ConfigError` for invalid settings, settings that differ between ranks, unsupported
        layers and weights that cannot be identified.
        """
        parsed = GenerateSettings.read(settings)
        ranks = model.tp_size or 1
        read = FileDigests(
            Path(parsed.weight_digests or f"{HF_HOME}/lockstep").expanduser() / "weights.json",
            log=log,
        )
        weights = weights_of(model, parsed.weights_version, read)
        rest = configuration_digest(model, transformers_version)
        pages = SequencePages(kept_layers(model, ranks), ranks, parsed.pages, parsed.page_tokens)
        host_pages = parsed.host_pages_of(pages.page_bytes)
        config = HostCacheConfig(
            model=parsed.model or model.config._name_or_path or type(model).__name__,  # noqa: SLF001
            weights_version=f"{weights}/{rest}{pages.kept_whole}",
            layout=pages.layouts[KV_POOL],
            components=pages.components(host_pages),
            host_pages=host_pages,
            **parsed.for_cache(),
        )
        alone = InProcessGroup(1).member(0) if ranks == 1 else None
        cache = HostCache.open(config, pages.lent, alone)
        if cache.world_size != ranks:
            cache.close(flush=False)
            raise ConfigError(
                f"torch.distributed has {cache.world_size} ranks, but {ranks} of them divide the model"
                " by its heads; the cache needs one model for all ranks"
            )
        watch(cache, parsed.metrics_port)
        if cache.rank == 0:
            log.info(
                "Lockstep caches %d host pages of %d tokens in %.2f GiB on each of %d ranks; %s",
                host_pages,
                parsed.page_tokens,
                host_pages * pages.page_bytes / 2**30,
                ranks,
                f"store {without_secrets(parsed.store)}" if parsed.store else "no store",
            )
        return cls(model, cache, pages, parsed)

    @contextmanager
    def reuse(self, input_ids: torch.Tensor, *, salt: str = "") -> Generator[ReusedPast]:
        """Yield a past with the longest prefix of a prompt that every rank can restore.

        `input_ids` has shape [1, tokens]. Call `generate()` or the model with all tokens, or with those
        from `reused_tokens` on, and pass the past as `past_key_values`. If the block ends without an
        error, the prompt and the tokens computed after it are cached. Prompts with different `salt`
        share no pages.

        Raises `UsageError` for inputs that page keys do not cover (several sequences, padding,
        embeddings, images), for a model in training mode, and for parameters that have changed without
        a call of `reset`.
        """
        prompt = self._prompt(input_ids)
        name = str(next(self._names))
        past = self._find(name, prompt, salt)
        passes = ForwardPasses(past, prompt)
        hook = self._model.register_forward_pre_hook(passes, with_kwargs=True)
        self._in_use = True
        try:
            yield past
            if len(passes.tokens) != past.get_seq_length():
                raise UsageError(
                    f"{past.get_seq_length()} tokens were computed with this past, but only"
                    f" {len(passes.tokens)} by a call of the model that the cache was opened for"
                )
        except BaseException:
            self.cache.release(name)
            raise
        else:
            self._keep(name, passes.tokens, past.reused_tokens, salt)
        finally:
            hook.remove()
            past.over, self._in_use = True, False

    def reset(self, weights_version: str | None = None) -> None:
        """Record that the model's weights have changed; pages of the previous weights no longer match.

        If `weights_version` names the new weights, their pages also go to storage. Every cache that was
        opened in the same way then matches these pages after a `reset` with the same name. Without a
        name, pages of the new weights are kept only in host memory.
        """
        if self._in_use:
            raise UsageError("a past is in use; reset the cache after its block")
        self._signature = signature(self._model)
        if weights_version is not None:
            rest = configuration_digest(self._model, transformers_version)
            weights_version = f"version {weights_version}/{rest}{self._pages.kept_whole}"
        self.cache.reset(weights_version)

    def close(self) -> None:
        """Flush writes to storage, and leave the group. Every rank must call this."""
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # Do not wait for the other ranks: they detect this rank's exit and raise an error that
            # names it.
            self.cache.abandon()

    def _prompt(self, input_ids: torch.Tensor) -> list[int]:
        """Return a prompt's tokens; raise `UsageError` if the prompt cannot be cached."""
        if self._in_use:
            raise UsageError("a past is in use already; the cache has memory for one sequence")
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise UsageError(
                f"input_ids are {list(input_ids.shape)}, must be [1, tokens]: one sequence at a time"
            )
        if self._model.training:
            raise UsageError("the model is training; call model.eval()")
        if signature(self._model) != self._signature:
            raise UsageError(
                "the model's parameters were changed since the cache was opened or reset; call reset"
            )
        return cast("list[int]", input_ids[0].tolist())

    def _find(self, name: str, prompt: Sequence[int], salt: str) -> ReusedPast:
        """Load the longest prefix that every rank can restore; return a past that has its KV."""
        cache = self.cache
        # Wait until no copy of an earlier `reuse` block accesses the device memory.
        cache.wait_for_copies()
        # Load all tokens but the last, which must be computed because its output is the next token.
        wanted = prompt[: min(len(prompt) - 1, self._settings.pages * self._settings.page_tokens)]
        found = 0
        for _ in range(1 if self._pages.narrowest is None else 2):
            cache.prefetch(name, wanted, salt)
            self._step_until(lambda: cache.prefetch_done(name))
            found = cache.match_host(name, wanted, salt)
            if found:
                break
            # Retry once if a prefetched page was lost, because the shorter prefix that remains may need
            # window pages that were not prefetched.
        if found:
            cache.load(name, wanted[:found], self._lent(found))
            cache.begin_loads()
            self._step_until(lambda: cache.load_state(name) is not LoadState.LOADING)
            if cache.load_state(name) is LoadState.FAILED:
                found = 0
        cache.admit(name, wanted, salt, device_tokens=found)
        layers = self._pages.layers()
        for layer in layers:
            layer.set_length(found)
        return ReusedPast(layers, found)

    def _keep(self, name: str, tokens: Sequence[int], reused: int, salt: str) -> None:
        """Back up the computed pages of a sequence; return when no copy reads its device memory."""
        unit = self._settings.page_tokens
        whole = min(len(tokens) // unit, self._settings.pages) * unit
        # Make a separate backup at each multiple of the window, so that another prompt can branch off
        # at any page. A single backup would save only the last window of the pages in window pools.
        step = self._pages.narrowest or whole
        for end in [*range(reused + step, whole, step), whole] if whole > reused else []:
            self.cache.back_up(name, tokens[:end], self._lent(end), salt)
        self.cache.begin_backups()
        if not self.cache.release(name):
            self.cache.finish_copies()
        self.cache.collect_freed()

    def _lent(self, tokens: int) -> Mapping[str, npt.NDArray[np.int32]]:
        """Return the device pages of a sequence's first `tokens` tokens, by pool.

        A page has the same index in every pool, even in a pool that has no content for it. The cache
        tracks which pages have content.
        """
        pages = np.arange(tokens // self._settings.page_tokens, dtype=np.int32)
        return dict.fromkeys(self.cache.needed_from(0), pages)

    def _step_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.cache.step(idle_s=self._settings.idle_wait_s)
