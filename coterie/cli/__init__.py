"""One file per command, a folder where a command has actions."""
