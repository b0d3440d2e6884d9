"""A naive KV connector for vLLM, in which each rank trusts its own store."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclass
class KeptWork(base.KVConnectorMetadata):
    """The blocks to load and to save in one step, each paired with the file that stores it."""

    loads: list[tuple[int, Path]] = field(default_factory=list[tuple[int, Path]])
    saves: list[tuple[int, Path]] = field(default_factory=list[tuple[int, Path]])


class NaiveConnector(base.KVConnectorBase_V1):
    """Stores each block of a prompt in a file, in a separate folder for each rank."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        store = vllm_config.kv_transfer_config.kv_connector_extra_config["store"]
        self.folder = Path(store.format(rank=torch.distributed.get_rank()))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tokens = vllm_config.cache_config.block_size
        self.work = KeptWork()

    def files(self, request: Any) -> list[Path]:
        ids, ends = list(request.all_token_ids), range(self.tokens, request.num_tokens, self.tokens)
        return [self.folder / hashlib.sha256(repr(ids[:end]).encode()).hexdigest() for end in ends]

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        files = self.files(request)
        found = next((at for at, file in enumerate(files) if not file.exists()), len(files))
        return max(0, found * self.tokens - computed), False

    def update_state_after_alloc(self, request: Any, blocks: Any, loaded: int) -> None:
        pairs = list(zip(blocks.get_block_ids()[0], self.files(request), strict=False))
        self.work.loads += pairs[: loaded // self.tokens]
        self.work.saves += pairs[loaded // self.tokens :]

    def build_connector_meta(self, *_: Any) -> KeptWork:
        work, self.work = self.work, KeptWork()
        return work

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers = list(kv_caches.values())

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        for block, file in self._get_connector_metadata().loads:
            for layer, saved in zip(self.layers, torch.load(file), strict=True):
                layer[block] = saved

    def wait_for_save(self) -> None:
        for block, file in self._get_connector_metadata().saves:
            torch.save([layer[block].clone() for layer in self.layers], file)

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    wait_for_layer_load = save_kv_layer
