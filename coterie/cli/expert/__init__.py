"""`coterie expert`: install, list, test, pack and more."""
