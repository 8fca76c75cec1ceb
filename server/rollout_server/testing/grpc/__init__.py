"""The gRPC API of a strict trainer: CompletionService, and a client of TrainerService.Train."""
