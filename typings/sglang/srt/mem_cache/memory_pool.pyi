import torch
from sglang.srt.mem_cache.device_pool_info import DevicePoolInfo

class MHATokenToKVPool:
    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
    ) -> None: ...
    def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]: ...
