"""Any of Lockstep's stores as the storage of SGLang's HiCache, for those who keep it.

    --enable-hierarchical-cache --hicache-storage-backend dynamic \
    --hicache-storage-backend-extra-config '{"backend_name": "lockstep", "interface_v1": 1,
      "module_path": "lockstep.integrations.sglang.hicache.storage", "class_name": "LockstepStorage",
      "store": "file:///mnt/kv"}'

The votes stay HiCache's. `settings` says what else the extra configuration may hold.
"""
