"""Both attention kernels against dense fp64 attention, over blocks in random order with NaN in every other place."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.triton.decode_attention import MAX_SPLITS, MIN_KEYS, choose_num_splits, decode_attention
from kernels.triton.gpu import Gpu
from kernels.triton.prefill_attention import prefill_attention
from tests.kernels.paged import PagedBatch, make_paged_batch
from tests.kernels.triton.here import gpu

pytestmark = pytest.mark.usefixtures("device")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest difference allowed from fp64, for values of order 1.

float32: as of the reference, sums of some hundred terms.
float16, bfloat16: weights of values are rounded to 2**-12 and 2**-9 of themselves before the product, which moves their
sum by no more than that part of the largest value, up to 4, and the output is rounded once more.
"""

# GQA ratios 1, 3, 4 and 8; head_dims that are no power of two, and less than a product takes.
HEADS = [(2, 2, 16), (6, 2, 64), (4, 1, 80), (8, 1, 32)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


# Smaller than a block and a tile, around their sizes and those of several tiles, and larger than every context.
WINDOWS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 70, 97, 200]


def prefill(batch: PagedBatch, window: int | None = None, softcap: float | None = None) -> Tensor:
    lens = batch.cu_seqlens_q, batch.context_lens
    rows = batch.q, batch.kv, *lens, batch.block_tables
    return prefill_attention(*rows, batch.scale, batch.max_seqlen_q, gpu(), window=window, softcap=softcap)


def decode(
    batch: PagedBatch, num_processors: int = 8, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """num_processors: of a GPU that is otherwise the one here; they decide into how many parts keys are split."""
    rows = batch.q, batch.kv, batch.block_tables, batch.context_lens
    return decode_attention(*rows, batch.scale, Gpu(gpu().family, num_processors), window=window, softcap=softcap)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert (actual.double() - expected).abs().max().item() <= TOLERANCE[actual.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_prefill_of_a_ragged_batch_equals_dense_attention(num_heads, num_kv_heads, head_dim, dtype):
    # One token, none at all, whole prompts around the tiles, and prefixes on and off the borders of blocks.
    query_lens, context_lens = [1, 0, 32, 9, 11, 16, 1], [1, 5, 32, 9, 76, 48, 66]
    batch = make_paged_batch(query_lens, context_lens, num_heads, num_kv_heads, head_dim, dtype)
    actual = prefill(batch)
    assert actual.dtype == dtype
    assert_close(actual, batch.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_decode_of_a_ragged_batch_equals_dense_attention(num_heads, num_kv_heads, head_dim, dtype):
    context_lens = [5, 1, 16, 33, 64, 131]
    batch = make_paged_batch([1] * 6, context_lens, num_heads, num_kv_heads, head_dim, dtype)
    actual = decode(batch, 1)
    assert actual.dtype == dtype
    assert_close(actual, batch.expected())


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_split_keys_make_up_the_whole(dtype):
    # Keys for some of the splits only, for all of them, and a last tile of one key.
    batch = make_paged_batch([1] * 3, [2, 513, 700], 3, 1, 16, dtype)
    assert choose_num_splits(3, batch.block_tables.shape[1] * 16, num_processors=8) > 2
    assert_close(decode(batch), batch.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
def test_prefill_in_a_window_equals_dense_attention(window, dtype):
    # Prompts without a prefix and with one that is longer than most windows; three heads leave rows of a tile unused.
    batch = make_paged_batch([1, 34, 9, 40], [1, 34, 9, 150], 3, 1, 16, dtype)
    assert_close(prefill(batch, window), batch.expected(window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
def test_decode_in_a_window_equals_dense_attention(window, dtype):
    batch = make_paged_batch([1] * 6, [5, 1, 16, 33, 64, 131], 3, 1, 16, dtype)
    assert_close(decode(batch, 1, window), batch.expected(window))


@pytest.mark.parametrize("window", [129, 300, 512, 600])
def test_parts_of_a_window_make_up_the_whole(window):
    # Contexts within the window, around it, and far beyond it.
    batch = make_paged_batch([1] * 3, [2, 513, 700], 3, 1, 16, torch.float32)
    assert_close(decode(batch, 16, window), batch.expected(window))


@pytest.mark.parametrize(("window", "first_tile"), [(20, 96), (35, 96), (36, 64), (68, 32)])
def test_tiles_before_the_window_are_not_read(window, first_tile):
    # Of the tokens 130 and 131, the first sees the key 131 - window.
    batch = make_paged_batch([2], [132], 2, 1, 16, torch.float32)
    expected = batch.expected(window)
    batch.poison(0, first_tile)
    assert_close(prefill(batch, window), expected)
    batch.q = batch.q[1:]
    assert_close(decode(batch, 8, window), expected[1:])


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy: to infinity, which is what is wanted
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_a_softcap_bounds_scores(softcap, window):
    batch = make_paged_batch([3, 20], [30, 75], 4, 2, 16, torch.float32)
    batch.q *= 10
    assert_close(prefill(batch, window, softcap), batch.expected(window, softcap))
    batch = make_paged_batch([1, 1], [30, 75], 4, 2, 16, torch.float32)
    batch.q *= 10
    assert_close(decode(batch, 8, window, softcap), batch.expected(window, softcap))


@pytest.mark.parametrize(("block_size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (64, torch.bfloat16)])
def test_block_sizes_below_and_above_the_tile_are_read_alike(block_size, dtype):
    batch = make_paged_batch([3, 20], [30, 75], 4, 2, 16, dtype, block_size=block_size)
    assert_close(prefill(batch), batch.expected())
    batch = make_paged_batch([1, 1], [30, 75], 4, 2, 16, dtype, block_size=block_size)
    assert_close(decode(batch), batch.expected())


def test_a_chunked_prompt_equals_the_whole_prompt():
    whole = make_paged_batch([70], [70], 3, 1, 16, torch.float32)
    outs = []
    for start, end in [(0, 17), (17, 18), (18, 70)]:
        cu_seqlens = torch.tensor([0, end - start], dtype=torch.int32)
        lens = torch.tensor([end], dtype=torch.int32)
        part = whole.q[start:end], whole.kv, cu_seqlens, lens, whole.block_tables
        outs.append(prefill_attention(*part, whole.scale, end - start, gpu()))
    assert_close(torch.cat(outs), whole.expected())


def test_scores_far_beyond_the_range_of_exp_stay_finite():
    batch = make_paged_batch([1], [300], 2, 1, 16, torch.float32)
    batch.q *= 1000
    assert_close(decode(batch), batch.expected())
    assert_close(prefill(batch), batch.expected())


def test_queries_may_be_a_view_of_a_linears_result():
    batch = make_paged_batch([4, 3], [20, 33], 4, 2, 16, torch.float32)
    batch.q = beside_nan(batch.q)
    assert_close(prefill(batch), batch.expected())
    batch = make_paged_batch([1, 1], [20, 33], 4, 2, 16, torch.float32)
    batch.q = beside_nan(batch.q)
    assert_close(decode(batch), batch.expected())


def beside_nan(q: Tensor) -> Tensor:
    """q as the first part of rows that are twice as long."""
    return torch.cat((q, torch.full_like(q, float("nan"))), dim=1)[:, : q.shape[1]]


def test_batches_without_sequences_are_answered_with_nothing():
    batch = make_paged_batch([1], [5], 4, 2, 16, torch.float32)
    batch.q, batch.block_tables, batch.context_lens = batch.q[:0], batch.block_tables[:0], batch.context_lens[:0]
    assert decode(batch).shape == (0, 4, 16)
    assert prefill(batch).shape == (0, 4, 16)


def test_splits_fill_the_gpu_and_are_never_too_small():
    assert choose_num_splits(num_rows=8, max_context=32768, num_processors=132) == 33
    assert choose_num_splits(num_rows=264, max_context=32768, num_processors=132) == 1
    assert choose_num_splits(num_rows=1000, max_context=32768, num_processors=132) == 1
    assert choose_num_splits(num_rows=8, max_context=1024, num_processors=132) == 1024 // MIN_KEYS
    assert choose_num_splits(num_rows=8, max_context=16, num_processors=132) == 1
    assert choose_num_splits(num_rows=1, max_context=10**6, num_processors=132) == MAX_SPLITS
