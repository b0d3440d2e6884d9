"""The scenario language of `tests/scenarios`: its parser, runner and printer."""
