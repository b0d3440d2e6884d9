"""Shared test support: stores, servers, ranks and engines under test, and contract suites."""
