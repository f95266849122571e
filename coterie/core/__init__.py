"""Values, errors and settings that every other folder uses. Imports only the standard library."""
