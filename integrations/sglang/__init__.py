"""Lockstep under SGLang.

`hicache_storage` is for those who keep SGLang's HiCache: any of Lockstep's stores as its storage.
"""
