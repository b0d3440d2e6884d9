from enum import StrEnum

class CacheHitSource(StrEnum):
    HOST = "host"
