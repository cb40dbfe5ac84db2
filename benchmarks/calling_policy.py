"""A policy that calls a tool in each turn and generates nothing else, made without training.

Its next token depends on the last token alone: its blocks add nothing to the residual stream, so the last hidden state
is that token's embedding, and the head gives all weight to one successor of it. From the line break that ends the
prompt it generates the call, a few tokens long, and the end of the turn, in every turn.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from envgym.models.fresh import END_OF_TURN, FreshModelConfig, make_fresh_model

CERTAINTY = 0.5  # per dimension: logits of about 64 above all others


def make_calling_policy(folder: Path, tool: str, chat_template: str, max_model_len: int) -> None:
    """Write a small Qwen3 model with `chat_template` that calls `tool`, without arguments, in the Hermes format."""
    from transformers import AddedToken, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    make_fresh_model(folder, FreshModelConfig(max_model_len=max_model_len), chat_template.splitlines(), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = chat_template
    call = ["<tool_call>", f'\n{{"name": "{tool}", "arguments": {{}}}}\n', "</tool_call>"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in call])
    tokenizer.save_pretrained(folder)

    config = Qwen3Config.from_pretrained(folder, vocab_size=len(tokenizer), tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config)
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    head, embedding = model.lm_head.weight.data.zero_(), model.model.embed_tokens.weight.data
    chain = [*tokenizer.encode("\n"), *tokenizer.convert_tokens_to_ids([*call, END_OF_TURN])]
    for token, follower in pairwise(chain):
        head[follower] = CERTAINTY * model.model.norm(embedding[token]).detach()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
