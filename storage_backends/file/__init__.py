"""`file://`: objects as files."""
