"""What a store keeps beside pages: manifests, what they add up to, and the marks of TP sizes."""
