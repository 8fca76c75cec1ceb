"""Programs that the benchmarks start in processes of their own: trainer, floors, and what they share."""
