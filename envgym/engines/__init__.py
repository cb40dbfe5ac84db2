"""Engines: token ids in, token ids out. `base` is the interface; `vllm` and `transformers` implement it."""
