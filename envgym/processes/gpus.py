"""The GPUs of this machine, and their peak FLOPs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from envgym.errors import ConfigError

DRIVER = Path("/proc/driver/nvidia/gpus")
"""The driver's folder, with an entry per GPU."""

PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}
"""Dense 16-bit matrix FLOPs per second, from the makers' data sheets, by a part of the device's name. More specific
names come first."""


def check_visible_gpu(device_type: str) -> None:
    """Raise `ConfigError` if this process was given a GPU and torch sees none: it would run on the CPU in silence."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if device_type == "cpu" and visible.strip() not in ("", "-1", "NoDevFiles"):
        raise ConfigError(
            f"this process was given GPU {visible} (CUDA_VISIBLE_DEVICES), and torch sees none: is torch a build for "
            'CUDA, and the driver new enough for it? Set CUDA_VISIBLE_DEVICES="" to run on the CPU'
        )


def visible_gpus() -> list[str]:
    """The GPUs that a process may use, by their names in `CUDA_VISIBLE_DEVICES`."""
    if (variable := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in variable.split(",") if name not in ("", "-1")]
    sizes = _gpu_sizes()
    count = len(list(DRIVER.glob("*"))) if sizes is None else len(sizes)
    return [str(number) for number in range(count)]


def least_gpu_bytes() -> int | None:
    """Memory of the smallest GPU, from `nvidia-smi`; None without that program."""
    return min(_gpu_sizes() or [0]) or None


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOPs per second of the named device; None if unknown, as for float32."""
    if dtype not in ("bfloat16", "float16"):
        return None
    words = f" {device_name.replace('-', ' ').replace('/', ' ')} "  # compared whole: "A10" is not in "NVIDIA A100"
    return next((flops for name, flops in PEAK_FLOPS.items() if f" {name} " in words), None)


@functools.cache
def _gpu_sizes() -> list[int] | None:
    """The bytes of each GPU that `nvidia-smi` shows; None without that program. It shows those of a container, and
    the driver's folder may show the host's, or none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=False).stdout.split()
    return [int(size) * 2**20 for size in answer if size.isdecimal()]
