"""Real servers for tests, each on loopback or in a temporary directory."""
