"""Protocols of the SGLang objects that the plug-in uses, and the plug-in's user settings."""
