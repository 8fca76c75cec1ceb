"""The way of a trainer that is only a client: one stream of `TrainerService.Train` (trainer_service.proto)."""
