"""What many tests share: a small Qwen3 policy with random weights, and a byte-level tokenizer that merges."""

from pathlib import Path

import pytest

TEXT = """what is twelve plus thirty-four? the answer is forty-six. what is 12 + 34? the answer is 46.
A merging tokenizer writes the same text in more than one way, which a character tokenizer cannot."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model folder: Qwen3, 2 layers, tied embeddings, float32, 384 tokens with byte-pair merges.

    `<|im_end|>` (id 0) ends a turn; ids up to 511 are in the embedding, so a sampled id may have no text.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,  # far enough from uniform that a wrong log-probability shows
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=2,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved folder with a reward model of `tiny_model`'s architecture and tokenizer: one number a conversation."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("tiny_reward_model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny_model)
    config.num_labels, config.mean, config.std = 1, 0.5, 2.0
    Qwen3ForSequenceClassification(config).to(torch.float32).save_pretrained(folder)
    return folder


MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""What mistral_common's version 3 says of a conversation, as text for its SentencePiece vocabulary."""


@pytest.fixture(scope="session")
def tekken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real byte-level byte-pair tokenizer (131 thousand tokens) and its own chat template."""
    import mistral_common
    from transformers.integrations.mistral import convert_tekken_tokenizer

    folder = tmp_path_factory.mktemp("tekken")
    data = Path(mistral_common.__file__).parent / "data"
    convert_tekken_tokenizer(str(data / "tekken_240911.json")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real SentencePiece byte-pair tokenizer (33 thousand tokens), which writes spaces as tokens' own
    beginnings, and a chat template."""
    import shutil

    import mistral_common
    from transformers import LlamaTokenizer

    folder = tmp_path_factory.mktemp("sentencepiece")
    data = Path(mistral_common.__file__).parent / "data"
    shutil.copy(data / "mistral_instruct_tokenizer_240323.model.v3", folder / "tokenizer.model")
    tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=True)  # as the models' own do by default
    tokenizer.chat_template = MISTRAL_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.model").unlink()
    return folder
