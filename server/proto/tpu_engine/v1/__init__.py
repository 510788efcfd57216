"""Version 1 of the public interface; `*_pb2*` files are generated, never edited."""
