from sglang.srt.mem_cache.device_pool_info import MHABufferInfo

class MHATokenToKVPoolHost:
    def __init__(
        self,
        buffer_info: MHABufferInfo,
        host_to_device_ratio: float,
        host_size: int,
        page_size: int,
        layout: str,
        pin_memory: bool = ...,
        *,
        device_capacity_tokens: int,
        start_layer: int,
        end_layer: int,
    ) -> None: ...
