"""Rules that must hold after every step; a broken rule raises a finding."""
