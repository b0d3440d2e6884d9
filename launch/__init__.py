"""The `lockstep` command and the launchers of ranks; only these read environment variables."""
