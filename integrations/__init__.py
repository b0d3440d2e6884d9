"""Plug-ins: Lockstep in engines that others write."""
