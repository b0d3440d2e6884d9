import torch

class MambaStateBufferInfo:
    def __init__(self, *, temporal: torch.Tensor, conv: tuple[torch.Tensor, ...]) -> None: ...

class MHABufferInfo: ...

class DevicePoolInfo:
    buffer_info: MHABufferInfo
