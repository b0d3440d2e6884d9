"""What subcommands share: options, amounts, errors, interruption, progress, the environment."""
