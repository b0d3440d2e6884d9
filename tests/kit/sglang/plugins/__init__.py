"""SGLang plug-ins that tests select by name. SGLang finds them through this folder's dist-info."""
