"""Values, errors and settings that everybody shares. Standard library alone."""
