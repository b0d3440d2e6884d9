"""Lockstep under SGLang: host memory and storage beside SGLang's own tree, the same on every rank.

SGLang finds the plug-in by its entry point and takes it where it is asked for by name:

    python -m sglang.launch_server --model-path ... --tp 4 --page-size 64 \
        --enable-hierarchical-cache --radix-cache-backend lockstep \
        --hicache-storage-backend dynamic \
        --hicache-storage-backend-extra-config '{"store": "file:///mnt/kv"}'

`settings` says what the extra configuration may hold. What needs SGLang is imported when SGLang asks.
"""
