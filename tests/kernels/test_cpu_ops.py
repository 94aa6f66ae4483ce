"""The native blocks against the reference, at odd sizes, on every instruction level that this machine can run."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.argmax import argmax
from kernels.blocks import (
    AttentionWeights,
    LayerWeights,
    LinearWeight,
    MLPWeights,
    NormWeight,
)
from kernels.composed import ComposedAttention, ComposedHead, ComposedMLP
from kernels.cpu.cores import private_cores
from kernels.cpu.library import NoNativeOps, usable_levels
from kernels.cpu.ops import CpuOps
from kernels.paged_kv import LayerKV
from kernels.quantised_linear import quantise_weight
from kernels.token_rows import DecodeRows, PrefillRows, TokenRows
from tests.kernels.paged import make_kv

DTYPES = [torch.float32, torch.bfloat16]
LEVELS = usable_levels()
HEADS = [(9, 3, 64), (3, 3, 16), (4, 1, 80), (10, 1, 128), (32, 2, 64)]
BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Of outputs of order 1. bfloat16: activations are rounded four times on their way, by 2**-9 each, and summed."""


def make_ops(dtype: torch.dtype, level: str | None = None, num_cores: int = 3, head_dim: int = 64) -> CpuOps:
    return CpuOps(dtype, head_dim, BLOCK_SIZE, private_cores(num_cores), level=level)


class Random:
    """Tensors of one dtype, the same every time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def linear(self, out_size: int, in_size: int, *, has_bias: bool = True) -> LinearWeight:
        weight = (self.normal(out_size, in_size) / in_size**0.5).to(self._dtype)
        return LinearWeight(weight, self.normal(out_size) if has_bias else None)

    def norm(self, size: int) -> NormWeight:
        return NormWeight((self.normal(size) / 4 + 1).to(self._dtype), 1e-5)


def in_fp32(weight: LinearWeight) -> LinearWeight:
    return LinearWeight(weight.weight.float(), None if weight.bias is None else weight.bias.float())


def norm_in_fp32(norm: NormWeight) -> NormWeight:
    return NormWeight(norm.weight.float(), norm.eps)


def make_attention(random: Random, num_heads: int, num_kv_heads: int, head_dim: int, hidden: int) -> AttentionWeights:
    return AttentionWeights(
        norm=random.norm(hidden),
        qkv=random.linear((num_heads + 2 * num_kv_heads) * head_dim, hidden),
        out=random.linear(hidden, num_heads * head_dim),
        cos_sin=torch.randn(2048, head_dim, generator=torch.Generator().manual_seed(1)).clamp(-1, 1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def make_rows(decode_lens: list[int], prefill: list[tuple[int, int]]) -> tuple[TokenRows, int]:
    """decode_lens: contexts;  prefill: (new tokens, context). Returns rows over blocks in any order, and how many."""
    contexts = decode_lens + [context for _, context in prefill]
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2)).int()
    tables = torch.full((len(contexts), max(counts) + 1), 2**30, dtype=torch.int32)
    for table, block_ids in zip(tables, order.split(counts), strict=True):
        table[: len(block_ids)] = block_ids
    new = [1] * len(decode_lens) + [count for count, _ in prefill]
    positions = [torch.arange(context - count, context) for count, context in zip(new, contexts, strict=True)]
    slots = [
        table[position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        for table, position in zip(tables, positions, strict=True)
    ]
    num_decode = len(decode_lens)
    lens = torch.tensor(contexts, dtype=torch.int32)
    runs = [count for count, _ in prefill]
    return TokenRows(
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        num_decode_rows=num_decode,
        decode=DecodeRows(tables[:num_decode], lens[:num_decode]) if decode_lens else None,
        prefill=PrefillRows(torch.tensor([0, *runs]).cumsum(0).int(), max(runs), tables[num_decode:], lens[num_decode:])
        if prefill
        else None,
    ), sum(counts)


def fill_contexts(kv: LayerKV, rows: TokenRows, random: Random) -> None:
    """Something in every slot before the rows' own; the slots behind them keep what was there."""
    runs = rows.prefill.cu_seqlens.diff().tolist() if rows.prefill else []
    for part, counts in ((rows.decode, [1] * rows.num_decode_rows), (rows.prefill, runs)):
        if part is None:
            continue
        for table, context, count in zip(part.block_tables, part.context_lens.tolist(), counts, strict=True):
            position = torch.arange(context - count)
            slots = table[position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
            shape = len(position), kv.num_kv_heads, kv.head_dim
            kv.write(random.normal(*shape), random.normal(*shape), slots)


def copy_in_fp32(kv: LayerKV) -> LayerKV:
    num_blocks = len(kv.keys)
    copy = make_kv(num_blocks, kv.num_kv_heads, kv.block_size, kv.head_dim, torch.float32)
    k, v = kv.read(torch.arange(num_blocks).unsqueeze(0))
    copy.write(k[0].transpose(0, 1), v[0].transpose(0, 1), torch.arange(num_blocks * kv.block_size))
    return copy


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.float(), wanted.float(), rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def check_attention(
    ops: CpuOps, weights: AttentionWeights, dtype: torch.dtype, rows: TokenRows, num_blocks: int
) -> None:
    random = Random(dtype)
    kv = make_kv(num_blocks + 2, weights.num_kv_heads, BLOCK_SIZE, weights.head_dim, dtype)
    fill_contexts(kv, rows, random)
    exact_kv = copy_in_fp32(kv)
    hidden = weights.norm.weight.shape[0]
    x, residual = torch.randn(2, len(rows.positions), hidden, generator=torch.Generator().manual_seed(3))
    exact = replace(weights, norm=norm_in_fp32(weights.norm), qkv=in_fp32(weights.qkv), out=in_fp32(weights.out))
    wanted, wanted_residual = ComposedAttention(exact)(x.clone(), residual.clone(), rows, exact_kv)
    got, got_residual = ops.attention(weights)(x.clone(), residual.clone(), rows, kv)
    assert_close(got, wanted, dtype)
    torch.testing.assert_close(got_residual, wanted_residual)
    slots = rows.slot_mapping
    for part in range(2):
        written, expected = (
            one.read(torch.arange(num_blocks + 2).unsqueeze(0))[part][0][:, slots] for one in (kv, exact_kv)
        )
        assert_close(written, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_attention_of_decode_and_prefill_rows_is_the_references(
    num_heads: int, num_kv_heads: int, head_dim: int, level: str, dtype: torch.dtype
) -> None:
    # Contexts on and around block and tile borders; prompts with and without a prefix.
    rows, num_blocks = make_rows(
        [1, 2, 15, 16, 17, 63, 64, 65, 700], [(2, 2), (17, 17), (64, 64), (33, 98), (5, 261), (16, 64)]
    )
    weights = make_attention(Random(dtype), num_heads, num_kv_heads, head_dim, hidden=75)
    check_attention(make_ops(dtype, level, head_dim=head_dim), weights, dtype, rows, num_blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decode_lens", [[1], [300], [513], [1025, 40]])
def test_few_sequences_are_split_over_their_keys(decode_lens: list[int], dtype: torch.dtype) -> None:
    rows, num_blocks = make_rows(decode_lens, [])
    weights = make_attention(Random(dtype), 9, 3, 64, hidden=576)
    check_attention(make_ops(dtype, num_cores=8), weights, dtype, rows, num_blocks)


def test_the_first_block_begins_the_residual() -> None:
    rows, num_blocks = make_rows([5], [(3, 3)])
    weights = make_attention(Random(torch.float32), 3, 3, 16, hidden=32)
    x = torch.randn(4, 32)
    kv, exact_kv = (make_kv(num_blocks, 3, BLOCK_SIZE, 16, torch.float32, fill=0.0) for _ in range(2))
    got, residual = make_ops(torch.float32, head_dim=16).attention(weights)(x.clone(), None, rows, kv)
    wanted, wanted_residual = ComposedAttention(weights)(x, None, rows, exact_kv)
    assert_close(got, wanted, torch.float32)
    assert torch.equal(residual, wanted_residual)


def test_layers_in_one_call_are_the_same_to_the_bit_as_block_after_block() -> None:
    random = Random(torch.float32)
    layers = [
        LayerWeights(
            make_attention(random, 6, 2, 16, hidden=96),
            MLPWeights(random.norm(96), random.linear(160, 96), random.linear(96, 80)),
        )
        for _ in range(3)
    ]
    rows, num_blocks = make_rows([5, 20], [(3, 3), (7, 40)])
    caches, others = (
        [make_kv(num_blocks, 2, BLOCK_SIZE, 16, torch.float32, fill=0.0) for _ in layers] for _ in range(2)
    )
    ops = make_ops(torch.float32, head_dim=16)
    decoder = ops.decoder(iter(layers))
    blocks = [(ops.attention(layer.attention), ops.mlp(layer.mlp)) for layer in layers]
    embeddings = torch.randn(len(rows.positions), 96, generator=torch.Generator().manual_seed(6))
    for _ in range(2):
        x, residual = embeddings.clone(), None
        for (attention, mlp), kv in zip(blocks, others, strict=True):
            x, residual = mlp(*attention(x, residual, rows, kv))
        assert residual is not None
        expected = x + residual
        got, got_residual = decoder(embeddings.clone(), rows, caches)
        assert torch.equal(got + got_residual, expected)
        assert all(torch.equal(kv.keys, other.keys) for kv, other in zip(caches, others, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_in_fp32_a_row_is_the_same_to_the_bit_in_every_batch(level: str) -> None:
    """The last token of a context of 700: alone, among others, and as the end of a prompt."""
    context, hidden = 700, 96
    weights = make_attention(Random(torch.float32), 6, 2, 16, hidden)
    mlp_weights = MLPWeights(
        *(weights.norm, Random(torch.float32).linear(160, hidden), Random(torch.float32).linear(hidden, 80))
    )
    kv = make_kv(48, 2, BLOCK_SIZE, 16, torch.float32, fill=0.0)
    ops = make_ops(torch.float32, level, num_cores=8, head_dim=16)
    attention, mlp = ops.attention(weights), ops.mlp(mlp_weights)
    hidden_states = torch.randn(context, hidden, generator=torch.Generator().manual_seed(4))

    def run(decode: bool, count: int) -> Tensor:
        """The last `count` tokens of the sequence, as one prompt or each as a sequence of its own."""
        table = torch.arange(48, dtype=torch.int32).repeat(count, 1)
        positions = torch.arange(context - count, context)
        rows = TokenRows(
            positions=positions,
            slot_mapping=positions,
            num_decode_rows=count if decode else 0,
            decode=DecodeRows(table, positions.int() + 1) if decode else None,
            prefill=None
            if decode
            else PrefillRows(torch.tensor([0, count]).int(), count, table[:1], torch.tensor([context]).int()),
        )
        x, residual = attention(hidden_states[context - count :].clone(), None, rows, kv)
        x, residual = mlp(x, residual)
        return (x + residual)[-1].clone()

    expected = run(decode=False, count=context)
    for decode, count in ((False, 5), (False, 1), (True, 1), (True, 2), (True, 3), (True, 40)):
        assert torch.equal(run(decode, count), expected), (decode, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 16, 17, 33, 130])
@pytest.mark.parametrize(("hidden", "size"), [(75, 33), (576, 1536)])
def test_mlp_is_the_references(hidden: int, size: int, num_rows: int, level: str, dtype: torch.dtype) -> None:
    random = Random(dtype)
    weights = MLPWeights(random.norm(hidden), random.linear(2 * size, hidden), random.linear(hidden, size))
    exact = MLPWeights(norm_in_fp32(weights.norm), in_fp32(weights.gate_up), in_fp32(weights.down))
    x, residual = torch.randn(2, num_rows, hidden, generator=torch.Generator().manual_seed(3))
    wanted, wanted_residual = ComposedMLP(exact)(x.clone(), residual.clone())
    got, got_residual = make_ops(dtype, level).mlp(weights)(x.clone(), residual.clone())
    assert_close(got, wanted, dtype)
    torch.testing.assert_close(got_residual, wanted_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 40])
@pytest.mark.parametrize("vocab_size", [1, 101, 1000])
def test_head_is_the_references(vocab_size: int, num_rows: int, level: str, dtype: torch.dtype) -> None:
    random = Random(dtype)
    norm, weight = random.norm(64), random.linear(vocab_size, 64, has_bias=False)
    x, residual = torch.randn(2, num_rows, 64, generator=torch.Generator().manual_seed(3))
    wanted = ComposedHead(norm_in_fp32(norm), in_fp32(weight))(x.clone(), residual.clone())
    assert_close(make_ops(dtype, level).head(norm, weight)(x.clone(), residual.clone()), wanted, dtype)


def make_quantised(out_size: int, in_size: int, quantization: str) -> tuple[Tensor, Tensor]:
    """A weight and what it is after rounding."""
    weight = torch.randn(out_size, in_size, generator=torch.Generator().manual_seed(5)) / in_size**0.5
    return weight, quantise_weight(weight, quantization).dequantise().contiguous()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 40])
@pytest.mark.parametrize(("hidden", "size"), [(75, 33), (576, 1536)])
def test_a_quantised_mlp_is_the_reference_of_rounded_weights(
    hidden: int, size: int, num_rows: int, level: str, quantization: str
) -> None:
    random = Random(torch.float32)
    norm, biases = random.norm(hidden), (random.normal(2 * size), random.normal(hidden))
    gate_up, rounded_gate_up = make_quantised(2 * size, hidden, quantization)
    down, rounded_down = make_quantised(hidden, size, quantization)
    weights = MLPWeights(norm, LinearWeight(gate_up, biases[0]), LinearWeight(down, biases[1]))
    exact = MLPWeights(norm, LinearWeight(rounded_gate_up, biases[0]), LinearWeight(rounded_down, biases[1]))
    ops = CpuOps(torch.bfloat16, 64, BLOCK_SIZE, private_cores(2), quantization=quantization, level=level)
    x, residual = torch.randn(2, num_rows, hidden, generator=torch.Generator().manual_seed(3))
    wanted, _ = ComposedMLP(exact)(x.clone(), residual.clone())
    got, _ = ops.mlp(weights)(x.clone(), residual.clone())
    assert_close(got, wanted, torch.bfloat16)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 15, 16])
def test_few_rows_are_rounded_to_bfloat16_and_no_further(
    num_rows: int, level: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight bits for inputs would be 0.006 off, and weights in bfloat16 0.002."""
    if num_rows > 4 and level != "avx512_bf16":
        pytest.skip("panels are expanded to bfloat16 there")
    hidden, size = 608, 1000
    weight, rounded = make_quantised(size, hidden, quantization)
    ops = CpuOps(torch.bfloat16, 64, BLOCK_SIZE, private_cores(2), quantization=quantization, level=level)
    monkeypatch.setattr(ops, "pack_head", ops.pack)
    head = ops.head(NormWeight(torch.ones(hidden), 0.0), LinearWeight(weight))
    x = torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(3))
    x[:, 7] *= 30  # beside it, the others of its group are small
    x[0, 64:96] = 0
    normed = (x / x.pow(2).mean(1, keepdim=True).sqrt()).bfloat16()
    wanted = normed.double() @ rounded.double().T
    assert (head(x, torch.zeros_like(x)) - wanted).pow(2).mean().sqrt() < 3e-4 * wanted.pow(2).mean().sqrt()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_stays_broken_and_alone(broken: float, level: str, quantization: str) -> None:
    ops = CpuOps(torch.bfloat16, 64, BLOCK_SIZE, private_cores(2), quantization=quantization, level=level)
    head = ops.head(NormWeight(torch.ones(64), 1e-5), LinearWeight(torch.ones(48, 64)))
    x = torch.ones(3, 64)
    x[1, 5] = broken
    logits = head(x, torch.zeros_like(x))
    assert logits[[0, 2]].isfinite().all()
    assert not logits[1].isfinite().any()


def test_quantised_weights_need_bfloat16() -> None:
    with pytest.raises(NoNativeOps, match="quantization int4 needs dtype bfloat16"):
        CpuOps(torch.float32, 64, 16, private_cores(1), quantization="int4")


@pytest.mark.parametrize("num_cores", [1, 2, 7])
def test_helpers_do_not_change_the_result(num_cores: int) -> None:
    random = Random(torch.bfloat16)
    weights = MLPWeights(random.norm(576), random.linear(3072, 576), random.linear(576, 1536))
    x, residual = torch.randn(2, 200, 576, generator=torch.Generator().manual_seed(3))
    alone = make_ops(torch.bfloat16, num_cores=1).mlp(weights)(x.clone(), residual.clone())
    ops = make_ops(torch.bfloat16, num_cores=num_cores)
    mlp = ops.mlp(weights)
    for _ in range(20):
        ops.begin_step()
        got = mlp(x.clone(), residual.clone())
        assert torch.equal(got[0], alone[0])


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"head_dim": 24}, "head_dim must be a multiple of 16 up to 256, got 24"),
        ({"head_dim": 272}, "got 272"),
        ({"block_size": 8}, "block_size must be a multiple of 16, got 8"),
    ],
)
def test_what_is_not_there_is_said(request_: dict[str, object], named: str) -> None:
    options: dict[str, object] = {"dtype": torch.bfloat16, "head_dim": 64, "block_size": 16} | request_
    with pytest.raises(NoNativeOps, match=named):
        CpuOps(**options, cores=private_cores(1))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1000])
def test_argmax_is_the_references(vocab_size: int, level: str) -> None:
    logits = torch.randint(-5, 5, (9, vocab_size), generator=torch.Generator().manual_seed(1)).float()
    logits[3, vocab_size // 2] = float("nan")
    logits[4] = float("-inf")
    logits[5, vocab_size - 1] = float("inf")
    maxima, indices = make_ops(torch.float32, level).argmax(logits)
    wanted, _ = argmax(logits)
    torch.testing.assert_close(maxima, wanted, equal_nan=True, rtol=0, atol=0)
    for row in (0, 1, 2, 4, 5, 6, 7, 8):
        assert indices[row] == (logits[row] == maxima[row]).nonzero()[0], f"the first of equals in row {row}"


def test_phases_are_timed_from_when_somebody_asks() -> None:
    random = Random(torch.bfloat16)
    ops = make_ops(torch.bfloat16)
    mlp = ops.mlp(MLPWeights(random.norm(96), random.linear(160, 96), random.linear(96, 80)))
    mlp(torch.randn(3, 96), torch.randn(3, 96))
    seconds = ops.time_phases()
    assert set(seconds().values()) == {0.0}
    mlp(torch.randn(3, 96), torch.randn(3, 96))
    assert {name for name, time_s in seconds().items() if time_s > 0} == {"norm", "gate_up", "down"}
