"""Adapters as requests see them: which are installed, held, matched, loaded ahead."""
