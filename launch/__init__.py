"""The command and the launchers, and the only reader of the environment."""
