"""What an op must move and multiply at least, as the docstrings of Triton's launchers say it, and how fast GPUs can."""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.quantised_linear import BITS


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes read and written; a multiplication and an addition are two FLOPs."""

    num_bytes: float
    num_flops: float = 0.0


def rms_norm(num_tokens: int, hidden: int, itemsize: int, *, with_residual: bool) -> Work:
    num_values = num_tokens * hidden
    return Work(num_values * itemsize * (4 if with_residual else 2), 4 * num_values)


def silu_and_mul(num_tokens: int, intermediate: int, itemsize: int) -> Work:
    num_values = num_tokens * intermediate
    return Work(3 * num_values * itemsize, 5 * num_values)


def rope_and_cache(num_tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Work:
    num_bytes = num_tokens * head_dim * itemsize * (2 * heads + 5 * kv_heads)
    return Work(num_bytes, 3 * num_tokens * head_dim * (heads + kv_heads))


def decode_attention(context_lens: Sequence[int], heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Work:
    """Without rows that only fill up a product, and without the parts of splits."""
    num_keys = sum(context_lens)
    return Work(2 * num_keys * kv_heads * head_dim * itemsize, 4 * num_keys * heads * head_dim)


def prefill_attention(seq_lens: Sequence[int], heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Work:
    """Of whole prompts, with all that they read once."""
    num_tokens, num_pairs = sum(seq_lens), sum(length * (length + 1) // 2 for length in seq_lens)
    return Work(2 * num_tokens * (heads + kv_heads) * head_dim * itemsize, 4 * num_pairs * heads * head_dim)


def quantised_linear(num_tokens: int, in_size: int, out_size: int, quantization: str, itemsize: int) -> Work:
    """A group's scale and offset are an eighth of a byte for each weight."""
    weights = out_size * in_size * (BITS[quantization] / 8 + 1 / 8)
    return Work(weights + num_tokens * (in_size + out_size) * itemsize, 2 * num_tokens * in_size * out_size)


def sample(num_rows: int, vocab: int, num_passes: int) -> Work:
    """num_passes: over the logits; 1 is greedy, 2 are a draw from all tokens, about 4 one from some of them."""
    return Work(4 * num_rows * vocab * num_passes, 40 * num_rows * vocab if num_passes > 1 else 0)


def copy_blocks(num_bytes: int) -> Work:
    """num_bytes: of the staging buffer."""
    return Work(2 * num_bytes)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of a device. tflops: dense products of 16-bit values;  tflops_fp32: without units for products."""

    gbps: float
    tflops: float
    tflops_fp32: float

    def roofline_s(self, work: Work, itemsize: int) -> float:
        """The least time that the work can take, in values of so many bytes. Source: roofline model (2009)."""
        tflops = self.tflops_fp32 if itemsize == 4 else self.tflops
        return max(work.num_bytes / (self.gbps * 1e9), work.num_flops / (tflops * 1e12))


PEAKS = {
    "NVIDIA H200": Peaks(4800, 989, 67),  # NVIDIA H200 datasheet, SXM; half of its figure "with sparsity"
    "NVIDIA H200 NVL": Peaks(4800, 835, 60),  # the same, NVL
    "NVIDIA H100 80GB HBM3": Peaks(3350, 989, 67),  # NVIDIA H100 datasheet, SXM
    "NVIDIA H100 PCIe": Peaks(2000, 756, 51),  # the same, PCIe
    "NVIDIA A100-SXM4-80GB": Peaks(2039, 312, 19.5),  # NVIDIA A100 datasheet
    "NVIDIA A100 80GB PCIe": Peaks(1935, 312, 19.5),
    "NVIDIA A100-SXM4-40GB": Peaks(1555, 312, 19.5),
    "NVIDIA A100-PCIE-40GB": Peaks(1555, 312, 19.5),
    "AMD Instinct MI300X": Peaks(5300, 1307, 163.4),  # AMD Instinct MI300X datasheet
}
"""By the beginnings of names that PyTorch gives devices. What vendors say, not what was measured."""


def peaks_of(device_name: str) -> Peaks | None:
    """Of the longest name in the table that the device's begins with."""
    names = [name for name in PEAKS if device_name.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None
