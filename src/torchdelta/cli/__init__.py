"""The `torchdelta` command, one file per subcommand. The rest of the library does not import it."""
