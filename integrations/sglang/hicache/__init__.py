"""Makes any Lockstep store a storage backend of SGLang's HiCache; ranks still vote within HiCache."""
