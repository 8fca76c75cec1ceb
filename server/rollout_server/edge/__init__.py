"""All I/O: gRPC, trainers, tokenizers."""
