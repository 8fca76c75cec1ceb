"""Streaming transport: the trainer is only a client, on one `TrainerService.Train` stream (trainer_service.proto)."""
