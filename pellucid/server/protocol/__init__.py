"""What the server reads and writes: msgspec Structs, one module per endpoint, and the decoding of bodies."""
