"""Throughput of page handoffs between the hosts of two groups, compared with a bare connection."""
