"""Storage (L3): one asynchronous contract for all stores, and one module per kind of store."""
