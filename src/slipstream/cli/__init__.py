"""The `slipstream` command. Nothing heavy is imported before a command that needs it runs."""
