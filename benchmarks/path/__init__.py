"""Throughput from storage to host to device, compared with bare calls over the same files."""
