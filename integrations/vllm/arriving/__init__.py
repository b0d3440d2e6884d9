"""New requests: which of them are cached, and by what their items are known."""
