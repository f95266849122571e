"""HTTP, WebSocket and gRPC: dialects are translated, nothing else is done here."""
