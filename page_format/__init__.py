"""Pages: their layout, shards, stored objects and object names."""
