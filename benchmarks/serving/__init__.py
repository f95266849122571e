"""The server around a model: engine steps, the gateway, structured answers."""
