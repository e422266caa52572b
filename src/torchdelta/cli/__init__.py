"""The `torchdelta` command: one file a subcommand. A leaf, which nothing in the library imports."""
