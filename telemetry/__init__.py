"""What a running cache tells those who watch it: metrics, their port, and what they mean."""
