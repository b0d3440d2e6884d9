"""The cache that a user of Transformers opens beside a model, and takes up prefixes from."""

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
from .kept_layers import SequencePages, kept_layers
from .kv_identity import configuration_digest, signature, weights_of
from .past import ReusedPast
from .settings import GenerateSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("lockstep.transformers")


class LockstepCache:
    """Prefixes of one model, in host memory and storage, for one sequence at a time.

    Under tensor parallelism every rank makes the same calls in the same order, with the same tokens. As
    a context manager it is closed at the end of the block, and abandoned where that ends by an error.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        cache: HostCache,
        pages: SequencePages,
        settings: GenerateSettings,
    ) -> None:
        """Put one together; `open` does so for a model."""
        self.cache = cache
        """What is beneath: its statistics, `drop`, `attach_store` and the like."""
        self._model = model
        self._pages = pages
        self._settings = settings
        self._signature = signature(model)
        self._names = count()
        self._in_use = False

    @classmethod
    def open(cls, model: "PreTrainedModel", **settings: Any) -> "LockstepCache":
        """Open a cache for a model as it is now; every rank of the model calls it at the same point.

        `settings` are those of `GenerateSettings`; `host_memory_gib` or `host_pages` is required.
        Raises `ConfigError` for settings that make no sense or differ, for a model whose layers keep
        what has no pages, and for weights that cannot be told from others.
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
                f"torch.distributed has {cache.world_size} ranks, and {ranks} of them divide the model"
                " by its heads; the cache needs one model for all ranks"
            )
        watch(cache, parsed.metrics_port)
        if cache.rank == 0:
            log.info(
                "Lockstep keeps %d ranks alike: %d host pages of %d tokens on each, %.2f GiB, %s",
                ranks,
                host_pages,
                parsed.page_tokens,
                host_pages * pages.page_bytes / 2**30,
                f"store {without_secrets(parsed.store)}" if parsed.store else "no store",
            )
        return cls(model, cache, pages, parsed)

    @contextmanager
    def reuse(self, input_ids: torch.Tensor, *, salt: str = "") -> Generator[ReusedPast]:
        """Give the past of the longest prefix of a prompt that every rank can restore.

        `input_ids`, [1, tokens], is what `generate()`, or the model itself, is then given whole or from
        `reused_tokens` on, with the past as `past_key_values`. What was computed by the end of the
        block, the prompt and what followed it, is cached from then on; nothing is if the block ends by
        an error. Prompts of another `salt` share nothing.

        Raises `UsageError` for what would make a page's content depend on anything but the tokens:
        several sequences at once, padding, embeddings or pictures in the place of tokens, a model that
        is training, or one whose parameters were changed (see `reset`).
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
                    f"{past.get_seq_length()} tokens were computed with this past, and only"
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
        """Say that the model's weights were changed; nothing that the former gave is found any more.

        With `weights_version`, a name of the weights as they are now, what is computed goes to storage
        and is found by whoever opens a cache as this one was opened and resets it to the same name;
        without one, storage is left alone.
        """
        if self._in_use:
            raise UsageError("a past is in use; reset the cache after its block")
        self._signature = signature(self._model)
        if weights_version is not None:
            rest = configuration_digest(self._model, transformers_version)
            weights_version = f"version {weights_version}/{rest}{self._pages.kept_whole}"
        self.cache.reset(weights_version)

    def close(self) -> None:
        """Write what is on its way to storage, and leave the group. Every rank calls it."""
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # The others notice, and end with an error that names this rank; nobody is waited for.
            self.cache.abandon()

    def _prompt(self, input_ids: torch.Tensor) -> list[int]:
        """Return the tokens of a prompt; raises `UsageError` for what cannot be cached."""
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
        """Bring what every rank can restore of a prompt into the memory of the sequence."""
        cache = self.cache
        # Of a copy that has not ended in its time; all others were waited for when their block ended.
        cache.keep_off()
        # The last token has to be computed in any case: what comes out follows from it.
        wanted = prompt[: min(len(prompt) - 1, self._settings.pages * self._settings.page_tokens)]
        found = 0
        for _ in range(1 if self._pages.narrowest is None else 2):
            cache.prefetch(name, wanted, salt)
            self._step_until(lambda: cache.prefetch_done(name))
            found = cache.hit(name, wanted, salt)
            if found:
                break
            # Where a page was lost, a shorter prefix needs other pages of the windows: ask once more.
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
        """Copy what of a sequence is not in host memory yet, and wait until its memory is free."""
        unit = self._settings.page_tokens
        whole = min(len(tokens) // unit, self._settings.pages) * unit
        # Of a window what is copied is what the last tokens see. Other prompts leave this one anywhere,
        # so every page is the last of one copy or before the last within its window.
        step = self._pages.narrowest or whole
        for end in [*range(reused + step, whole, step), whole] if whole > reused else []:
            self.cache.back_up(name, tokens[:end], self._lent(end), salt)
        self.cache.begin_backups()
        if not self.cache.release(name):
            self.cache.finish_copies()
        self.cache.collect_freed()

    def _lent(self, tokens: int) -> Mapping[str, npt.NDArray[np.int32]]:
        """Return the pages of so many tokens by pool. The cache knows which no load has filled."""
        pages = np.arange(tokens // self._settings.page_tokens, dtype=np.int32)
        return dict.fromkeys(self.cache.needed_from(0), pages)

    def _step_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.cache.step(idle_s=self._settings.idle_wait_s)
