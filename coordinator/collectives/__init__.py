"""The transports that fold one round over all ranks."""
