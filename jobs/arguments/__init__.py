"""The options of every command, one file a command."""
