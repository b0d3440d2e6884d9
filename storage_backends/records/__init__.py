"""Records that a store holds in addition to pages: manifests, their totals, and TP size markers."""
