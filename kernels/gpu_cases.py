"""What is timed on a GPU: each op on sizes of a model, by Triton, by the reference, and by PyTorch's own op if any."""

# pyright: basic

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import work
from kernels.bench_sizes import Sizes
from kernels.composed import REFERENCE, SmallOps
from kernels.paged_kv import LayerKV, values_per_word
from kernels.quantised_linear import quantise_weight, quantised_linear
from kernels.sample import Draws
from kernels.work import Work

BLOCK_SIZE = 16
EPS = 1e-5
_NUM_LAYERS = 4
"""Of the blocks that are gathered and scattered: what a worker has more of only makes pieces longer."""


@dataclass(frozen=True, slots=True)
class Setup:
    """triton: the ops;  quantised: those whose linears have weights of so many bits."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    triton: SmallOps
    quantised: Mapping[str, SmallOps]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Of a decode step, and of a step that computes a prompt."""
        return self.sizes.rows, self.sizes.context


@dataclass(frozen=True, slots=True)
class Case:
    """runs: who computes it -> does so once, and returns what all of them return."""

    op: str
    what: str
    work: Work
    runs: Mapping[str, Callable[[], Tensor]]


def rms_norm_cases(setup: Setup) -> Iterator[Case]:
    hidden, weight = setup.sizes.hidden, setup.randn(setup.sizes.hidden)
    for num_tokens in setup.num_tokens:
        x, residual = setup.randn(num_tokens, hidden), setup.randn(num_tokens, hidden)
        runs = {
            "triton": lambda x=x, residual=residual: setup.triton.rms_norm(x, weight, EPS, residual)[0],
            "reference": lambda x=x, residual=residual: REFERENCE.rms_norm(x, weight, EPS, residual)[0],
            "torch": lambda x=x, residual=residual: F.rms_norm(x + residual, (hidden,), weight, EPS),
        }
        needed = work.rms_norm(num_tokens, hidden, setup.dtype.itemsize, with_residual=True)
        yield Case("rms_norm", f"{num_tokens} tokens, residual", needed, runs)


def silu_and_mul_cases(setup: Setup) -> Iterator[Case]:
    size = setup.sizes.mlp
    for num_tokens in setup.num_tokens:
        x = setup.randn(num_tokens, 2 * size)
        runs = {
            "triton": lambda x=x: setup.triton.silu_and_mul(x),
            "reference": lambda x=x: REFERENCE.silu_and_mul(x),
            "torch": lambda x=x: F.silu(x[:, :size]) * x[:, size:],
        }
        yield Case(
            "silu_and_mul", f"{num_tokens} tokens", work.silu_and_mul(num_tokens, size, setup.dtype.itemsize), runs
        )


def rope_and_cache_cases(setup: Setup) -> Iterator[Case]:
    """PyTorch has no such op."""
    s = setup.sizes
    counts = [s.heads, s.kv_heads, s.kv_heads]
    cos_sin = torch.randn(s.context, s.head_dim, device=setup.device)
    for num_tokens in setup.num_tokens:
        q, k, v = setup.randn(num_tokens, sum(counts), s.head_dim).split(counts, dim=1)
        kv = random_kv(setup, -(-num_tokens // BLOCK_SIZE))
        slots = torch.arange(num_tokens, device=setup.device)
        rows = q, k, v, cos_sin, slots % s.context, kv, slots
        runs = {
            "triton": lambda rows=rows: setup.triton.rope_and_cache(*rows)[0],
            "reference": lambda rows=rows: REFERENCE.rope_and_cache(*rows)[0],
        }
        needed = work.rope_and_cache(num_tokens, s.heads, s.kv_heads, s.head_dim, setup.dtype.itemsize)
        yield Case("rope_and_cache", f"{num_tokens} tokens", needed, runs)


def decode_attention_cases(setup: Setup) -> Iterator[Case]:
    """PyTorch's own reads keys and values that lie side by side already, padded to whole blocks no more than ours."""
    s = setup.sizes
    kv, tables = paged_kv(setup, s.rows)
    lens = torch.full((s.rows,), s.context, dtype=torch.int32, device=setup.device)
    q, scale = setup.randn(s.rows, s.heads, s.head_dim), s.head_dim**-0.5
    k, v = gathered(kv, tables, s.context)
    rows = q, kv, tables, lens, scale
    runs = {
        "triton": lambda: setup.triton.decode_attention(*rows),
        "reference": lambda: REFERENCE.decode_attention(*rows),
        "torch": lambda: F.scaled_dot_product_attention(q.unsqueeze(2), k, v, scale=scale, enable_gqa=True)[:, :, 0],
    }
    needed = work.decode_attention([s.context] * s.rows, s.heads, s.kv_heads, s.head_dim, setup.dtype.itemsize)
    yield Case("decode_attention", f"{s.rows} sequences of {s.context}", needed, runs)


def prefill_attention_cases(setup: Setup) -> Iterator[Case]:
    s = setup.sizes
    kv, tables = paged_kv(setup, 1)
    starts = torch.tensor([0, s.context], dtype=torch.int32, device=setup.device)
    q, scale = setup.randn(s.context, s.heads, s.head_dim), s.head_dim**-0.5
    k, v = gathered(kv, tables, s.context)
    dense = q.transpose(0, 1).unsqueeze(0).contiguous(), k, v
    rows = q, kv, starts, starts[1:], tables, scale, s.context
    runs = {
        "triton": lambda: setup.triton.prefill_attention(*rows),
        "reference": lambda: REFERENCE.prefill_attention(*rows),
        "torch": lambda: F.scaled_dot_product_attention(*dense, is_causal=True, scale=scale, enable_gqa=True)[
            0
        ].transpose(0, 1),
    }
    needed = work.prefill_attention([s.context], s.heads, s.kv_heads, s.head_dim, setup.dtype.itemsize)
    yield Case("prefill_attention", f"a prompt of {s.context}", needed, runs)


def quantised_linear_cases(setup: Setup) -> Iterator[Case]:
    """Gate and up of an MLP; PyTorch's own has the weights in the dtype of the rows."""
    in_size, out_size = setup.sizes.hidden, 2 * setup.sizes.mlp
    for quantization, ops in setup.quantised.items():
        weight = setup.randn(out_size, in_size) / in_size**0.5
        packed, quantised = ops.pack(weight, None), quantise_weight(weight, quantization)
        weight = quantised.dequantise().to(setup.dtype)
        for num_tokens in setup.num_tokens:
            x = setup.randn(num_tokens, in_size)
            runs = {
                "triton": lambda x=x, packed=packed: packed(x),
                "reference": lambda x=x, quantised=quantised: quantised_linear(x, quantised, None),
                "torch": lambda x=x, weight=weight: F.linear(x, weight),
            }
            needed = work.quantised_linear(num_tokens, in_size, out_size, quantization, setup.dtype.itemsize)
            yield Case("quantised_linear", f"{quantization}, {num_tokens} tokens", needed, runs)


def sample_cases(setup: Setup) -> Iterator[Case]:
    """PyTorch's own draws from all tokens, and other ones: its noise is not ours."""
    num_rows, vocab = setup.sizes.rows, setup.sizes.vocab
    logits = 3 * torch.randn(num_rows, vocab, device=setup.device)
    own = {"torch": lambda: torch.multinomial(logits.softmax(1), 1).flatten()}
    for what, top_p, num_passes in (("all tokens", 1.0, 2), ("top_p 0.9", 0.9, 4)):
        draws = draws_of(num_rows, top_p, setup.device)
        runs = {
            "triton": lambda draws=draws: setup.triton.sample(logits, draws),
            "reference": lambda draws=draws: REFERENCE.sample(logits, draws),
        }
        needed = work.sample(num_rows, vocab, num_passes)
        yield Case("sample", f"{num_rows} rows, {what}", needed, runs if top_p < 1.0 else runs | own)


def staging_cases(setup: Setup) -> Iterator[Case]:
    """Blocks of a sequence, with all of their heads."""
    s, num_blocks = setup.sizes, -(-setup.sizes.context // BLOCK_SIZE)
    blocks = setup.randn(2 * num_blocks, s.kv_heads, _NUM_LAYERS * 2 * BLOCK_SIZE * s.head_dim)
    ids = torch.randperm(2 * num_blocks, device=setup.device)[:num_blocks]
    staging = torch.empty_like(blocks[:num_blocks])
    needed = work.copy_blocks(staging.nbytes)

    def gather_by(ops: SmallOps) -> Tensor:
        ops.gather_blocks(blocks, ids, 0, staging)
        return staging

    def scatter_by(ops: SmallOps) -> Tensor:
        ops.scatter_blocks(staging, blocks, ids, 0)
        return blocks

    gathers = {
        "triton": lambda: gather_by(setup.triton),
        "reference": lambda: gather_by(REFERENCE),
        "torch": lambda: torch.index_select(blocks, 0, ids, out=staging),
    }
    scatters = {
        "triton": lambda: scatter_by(setup.triton),
        "reference": lambda: scatter_by(REFERENCE),
        "torch": lambda: blocks.index_copy_(0, ids, staging),
    }
    yield Case("staging", f"gather {num_blocks} blocks", needed, gathers)
    yield Case("staging", f"scatter {num_blocks} blocks", needed, scatters)


CASES: Mapping[str, Callable[[Setup], Iterator[Case]]] = {
    "rms_norm": rms_norm_cases,
    "silu_and_mul": silu_and_mul_cases,
    "rope_and_cache": rope_and_cache_cases,
    "decode_attention": decode_attention_cases,
    "prefill_attention": prefill_attention_cases,
    "quantised_linear": quantised_linear_cases,
    "sample": sample_cases,
    "staging": staging_cases,
}


def random_kv(setup: Setup, num_blocks: int) -> LayerKV:
    """One layer's blocks, keys and values of a head one behind the other."""
    size, pair = setup.sizes.head_dim, values_per_word(setup.dtype)
    blocks = setup.randn(num_blocks, setup.sizes.kv_heads, 2, BLOCK_SIZE * size)
    keys = blocks[:, :, 0].unflatten(2, (size // pair, BLOCK_SIZE, pair))
    return LayerKV(keys, blocks[:, :, 1].unflatten(2, (BLOCK_SIZE // pair, size, pair)))


def paged_kv(setup: Setup, num_seqs: int) -> tuple[LayerKV, Tensor]:
    """Of sequences that share no block, their blocks in random order; and the block tables."""
    num_blocks = -(-setup.sizes.context // BLOCK_SIZE)
    tables = torch.randperm(num_seqs * num_blocks, device=setup.device).int().view(num_seqs, num_blocks)
    return random_kv(setup, num_seqs * num_blocks), tables


def gathered(kv: LayerKV, tables: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """k and v, [num_seqs, num_kv_heads, context, head_dim], contiguous."""
    k, v = kv.read(tables.long())
    return k[:, :, :context].contiguous(), v[:, :, :context].contiguous()


def draws_of(num_rows: int, top_p: float, device: torch.device) -> Draws:
    def full(value: float) -> Tensor:
        return torch.full((num_rows,), value, dtype=torch.float32, device=device)

    zeros, positions = (torch.zeros(num_rows, dtype=torch.int64, device=device), torch.arange(num_rows, device=device))
    return Draws(full(1.0), zeros, full(top_p), full(0.0), zeros + 5, positions)
