"""What the checkers may find, one type for each thing that can break."""
