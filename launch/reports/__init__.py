"""What a run was like while it ran, and one page that shows a report to people."""
