"""Plug-ins that run Lockstep inside other inference engines."""
