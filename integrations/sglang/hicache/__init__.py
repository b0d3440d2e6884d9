"""Makes any Lockstep store a storage backend of SGLang's HiCache; HiCache's own votes stay."""
