"""Plug-ins of SGLang's that tests choose by name; the folder beside them is how SGLang finds them."""
