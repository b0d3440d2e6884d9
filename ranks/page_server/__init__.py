"""How other groups read this one's host pages (`peer://`)."""
