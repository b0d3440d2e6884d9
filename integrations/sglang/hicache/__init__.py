"""Any of Lockstep's stores as the storage of SGLang's HiCache, whose votes stay its own."""
