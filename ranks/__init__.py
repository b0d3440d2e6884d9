"""What one rank owns: its replica and its executor."""
