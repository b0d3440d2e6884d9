"""Pages: their layout, their shards, their objects in a store, and the names of those."""
