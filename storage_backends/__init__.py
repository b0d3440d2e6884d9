"""Storage (L3): one asynchronous contract, and one module for each store that implements it."""
