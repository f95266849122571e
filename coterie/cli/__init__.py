"""One file per command, or a folder for a command with several actions."""
