from enum import Enum
from typing import Any

class RequestStatus(Enum):
    FINISHED_ABORTED = 0

class Request:
    num_output_tokens: int
    def __init__(self, *arguments: Any, **options: Any) -> None: ...
