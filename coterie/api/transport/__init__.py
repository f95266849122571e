"""How bytes come and go: connections, server-sent events, WebSockets, gRPC."""
