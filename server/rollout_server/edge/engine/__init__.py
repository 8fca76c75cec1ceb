"""Samplers for inference engines: vLLM, SGLang and OpenAI-compatible endpoints. Engines know no rollouts, turns or masks."""
