"""Models with experts: the dispatch contract, stores, slots, and made-up routing."""
