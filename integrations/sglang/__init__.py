"""Lockstep under SGLang: its host and storage tiers, agreed on by all ranks."""
