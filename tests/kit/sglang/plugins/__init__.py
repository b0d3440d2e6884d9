"""SGLang plug-ins that tests select by name. SGLang finds them through the dist-info folder here."""
