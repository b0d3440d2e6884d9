"""Makes any Lockstep store a storage backend of SGLang's HiCache; HiCache itself makes ranks agree."""
