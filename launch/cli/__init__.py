"""Code that the subcommands share: options, amounts, errors, interruption, progress and environment."""
