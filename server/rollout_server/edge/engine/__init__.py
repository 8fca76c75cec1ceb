"""Inference engines as samplers: OpenAI-compatible endpoints, vLLM and SGLang. They know nothing of rollouts, masks or turns."""
