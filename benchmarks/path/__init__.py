"""The path that a user waits for: storage to host to device, beside bare calls over the same files."""
