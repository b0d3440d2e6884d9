"""Requests of a trace, routed to groups in virtual time by one policy or another."""
