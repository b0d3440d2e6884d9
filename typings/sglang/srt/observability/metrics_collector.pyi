class StorageMetrics:
    prefetch_pgs: list[int]
    backup_pgs: list[int]
    prefetch_bandwidth: list[float]
    backup_bandwidth: list[float]
    def __init__(
        self,
        prefetch_pgs: list[int] = ...,
        backup_pgs: list[int] = ...,
        prefetch_bandwidth: list[float] = ...,
        backup_bandwidth: list[float] = ...,
    ) -> None: ...
