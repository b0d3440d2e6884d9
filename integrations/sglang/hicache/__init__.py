"""Any Lockstep store as the storage backend of SGLang's HiCache; HiCache keeps its own votes."""
