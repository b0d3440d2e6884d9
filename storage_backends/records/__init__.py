"""Records: the small objects that a store holds in addition to pages (manifests, groups' markers)."""
