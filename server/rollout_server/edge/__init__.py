"""All I/O: gRPC, trainers, inference engines, tokenizers, tool processes and metrics."""
