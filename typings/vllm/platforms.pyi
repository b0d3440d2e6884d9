class DeviceCapability:
    def as_version_str(self) -> str: ...

class Platform:
    device_type: str
    @classmethod
    def get_device_capability(cls) -> DeviceCapability | None: ...

current_platform: Platform
