"""Lockstep under SGLang: host memory and storage below SGLang's tree, the same on every rank.

SGLang finds the plug-in by its entry point and uses it only if the user selects it by name:

    python -m sglang.launch_server --model-path ... --tp 4 --page-size 64 \
        --enable-hierarchical-cache --radix-cache-backend lockstep \
        --hicache-storage-backend dynamic \
        --hicache-storage-backend-extra-config '{"store": "file:///mnt/kv"}'

`engine/sglang_settings.py` defines the keys of the extra configuration. Modules that need SGLang are
imported only when SGLang calls the plug-in.
"""
