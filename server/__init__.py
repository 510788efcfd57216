"""The gRPC face of the engine and its command line; sees the engine's public interface only."""
