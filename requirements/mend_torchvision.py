"""Make torchvision importable beside a CPU torch. The Makefile runs it after `cpu.txt` is installed; twice is as once.

PyPI has torchvision for one CUDA alone. Beside a CPU torch its library of operators does not load, and `import
torchvision`, and with it `import transformers`, fails: "operator torchvision::nms does not exist". Two operators are
declared without their library. Declared here, without an implementation, they let everything else work: the processors
of vision-language models, which resize images by torch alone. A torchvision that imports is left as it is.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

DECLARATIONS = """

# Added by envgym's requirements/mend_torchvision.py: operators without their library.
if not _has_ops():
    _schemas = torch.library.Library("torchvision", "FRAGMENT")
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def import_error() -> str:
    """The last line of the error with which torchvision is imported, or an empty string."""
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def main() -> str:
    """Mend torchvision, and return a line that says so. Raises `SystemExit` where it still does not import."""
    error = import_error()
    if not error:
        return ""
    spec = find_spec("torchvision")
    if spec is not None and "torchvision::nms does not exist" in error:
        file = Path(str(spec.origin)).with_name("extension.py")
        file.write_text(file.read_text(encoding="utf-8") + DECLARATIONS, encoding="utf-8")
        error = import_error()
    if error:
        raise SystemExit(f"torchvision cannot be imported: {error}")
    return f"torchvision has no operators for a CPU: two are declared in {file}, so that it can be imported"


if __name__ == "__main__":
    if words := main():
        print(words)
