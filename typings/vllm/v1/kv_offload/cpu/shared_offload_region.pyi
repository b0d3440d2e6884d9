import torch

class SharedOffloadRegion:
    mmap_path: str
    mmap_obj: object | None
    def __init__(
        self,
        engine_id: str,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
    ) -> None: ...
    @property
    def base_tensor(self) -> torch.Tensor: ...
    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor: ...
    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor: ...
    def cleanup(self) -> None: ...
