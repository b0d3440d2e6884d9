from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo

class MambaPoolHost:
    def __init__(
        self,
        buffer_info: MambaStateBufferInfo,
        host_to_device_ratio: float,
        host_size: int,
        *,
        device_capacity: int,
        pin_memory: bool = ...,
        layout: str = ...,
    ) -> None: ...
