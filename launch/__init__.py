"""The `lockstep` command and the launchers of ranks; no other package reads environment variables."""
