"""The gRPC side of a strict trainer: CompletionService and the trainer's stream."""
