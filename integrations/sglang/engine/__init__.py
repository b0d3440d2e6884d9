"""SGLang as the plug-in sees it, and the plug-in's settings."""
