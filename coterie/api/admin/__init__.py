"""What an administrator may ask: experts are installed, changed and removed."""
