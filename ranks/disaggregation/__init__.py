"""What a group that prefills and one that decodes need of each other: pages, and small tensors."""
