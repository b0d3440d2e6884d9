"""Options, amounts, errors, interruption, progress and environment, shared by subcommands."""
