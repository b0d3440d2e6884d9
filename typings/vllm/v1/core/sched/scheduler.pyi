from typing import Any

class Scheduler:
    def __init__(self, *arguments: Any, **options: Any) -> None: ...
