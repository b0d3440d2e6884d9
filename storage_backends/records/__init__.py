"""Records that a store holds in addition to pages: manifests, and markers of groups' TP sizes."""
