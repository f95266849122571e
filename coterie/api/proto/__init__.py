"""The gRPC interface, as generated from its .proto file."""
