"""Real servers for tests, on loopback or in a temporary directory."""
