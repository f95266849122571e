"""How the service reaches an engine: one contract, several transports, restarts."""
