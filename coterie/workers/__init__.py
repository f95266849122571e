"""How the service uses an engine: one contract, several transports, restarts."""
