"""Both attention ops against dense fp64 attention."""

import pytest
import torch
from torch import Tensor

from kernels import decode_attention as decode_module
from kernels import prefill_attention as prefill_module
from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from tests.kernels.paged import TOLERANCE, PagedBatch, make_paged_batch

HEADS = [(3, 3, 64), (9, 3, 64), (4, 1, 80), (8, 1, 128)]
DTYPES = [torch.float32, torch.bfloat16]


# Smaller than a block and a tile, around their sizes, and larger than every context.
WINDOWS = [1, 2, 15, 16, 17, 64, 256, 257, 600, 2000]


def prefill(batch: PagedBatch, window: int | None = None, softcap: float | None = None) -> Tensor:
    return prefill_attention(
        batch.q,
        batch.kv,
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.block_tables,
        batch.scale,
        batch.max_seqlen_q,
        window=window,
        softcap=softcap,
    )


def decode(batch: PagedBatch, window: int | None = None, softcap: float | None = None) -> Tensor:
    lens = batch.block_tables, batch.context_lens
    return decode_attention(batch.q, batch.kv, *lens, batch.scale, window=window, softcap=softcap)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert (actual.double() - expected).abs().max().item() <= TOLERANCE[actual.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_prefill_of_a_ragged_batch_equals_dense_attention(num_heads, num_kv_heads, head_dim, dtype):
    # One token, whole prompts around the tile sizes, and prefixes on and off block boundaries.
    query_lens = [1, 63, 64, 65, 129, 7, 16, 1]
    context_lens = [1, 63, 64, 65, 129, 263, 48, 514]
    batch = make_paged_batch(query_lens, context_lens, num_heads, num_kv_heads, head_dim, dtype)
    actual = prefill(batch)
    assert actual.dtype == dtype
    assert_close(actual, batch.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_decode_of_a_ragged_batch_equals_dense_attention(num_heads, num_kv_heads, head_dim, dtype):
    context_lens = [5, 1, 16, 17, 511, 512, 513, 1030]
    batch = make_paged_batch([1] * 8, context_lens, num_heads, num_kv_heads, head_dim, dtype)
    actual = decode(batch)
    assert actual.dtype == dtype
    assert_close(actual, batch.expected())


@pytest.mark.parametrize("block_size", [1, 8, 32, 1024])
def test_block_sizes_below_and_above_the_tile_are_read_alike(block_size):
    batch = make_paged_batch([3, 70], [300, 1100], 4, 2, 16, torch.float32, block_size=block_size)
    assert_close(prefill(batch), batch.expected())
    last = batch.cu_seqlens_q[1:].long() - 1
    actual = decode_attention(batch.q[last], batch.kv, batch.block_tables, batch.context_lens, batch.scale)
    assert_close(actual, batch.expected()[last])


def test_a_chunked_prompt_equals_the_whole_prompt():
    whole = make_paged_batch([200], [200], 4, 2, 64, torch.float32)
    outs = []
    for start, end in [(0, 37), (37, 38), (38, 130), (130, 200)]:
        chunk = prefill_attention(
            whole.q[start:end],
            whole.kv,
            torch.tensor([0, end - start], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            whole.block_tables,
            whole.scale,
            end - start,
        )
        outs.append(chunk)
    assert_close(torch.cat(outs), whole.expected())


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_hides_all_keys_before_it(window, softcap):
    batch = make_paged_batch([1, 65, 129, 7], [1, 65, 400, 514], 4, 2, 16, torch.float32)
    assert_close(prefill(batch, window, softcap), batch.expected(window, softcap))
    batch = make_paged_batch([1] * 5, [1, 16, 17, 513, 1030], 4, 2, 16, torch.float32)
    assert_close(decode(batch, window, softcap), batch.expected(window, softcap))


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_a_softcap_bounds_scores(softcap):
    batch = make_paged_batch([9], [70], 4, 2, 16, torch.float32)
    batch.q *= 30
    assert_close(prefill(batch, softcap=softcap), batch.expected(softcap=softcap))
    batch = make_paged_batch([1, 1], [70, 3], 4, 2, 16, torch.float32)
    batch.q *= 30
    assert_close(decode(batch, softcap=softcap), batch.expected(softcap=softcap))


def test_many_small_tiles_equal_dense_attention(monkeypatch):
    monkeypatch.setattr(prefill_module, "BLOCK_M", 4)
    monkeypatch.setattr(prefill_module, "BLOCK_N", 16)
    monkeypatch.setattr(decode_module, "BLOCK_N", 16)
    batch = make_paged_batch([30, 1, 50], [47, 90, 50], 4, 2, 16, torch.float32)
    assert_close(prefill(batch), batch.expected())
    batch = make_paged_batch([1, 1, 1], [47, 90, 50], 4, 2, 16, torch.float32)
    assert_close(decode(batch), batch.expected())


def test_scores_far_beyond_the_range_of_exp_stay_finite():
    batch = make_paged_batch([40], [600], 2, 1, 16, torch.float32)
    batch.q *= 1000
    assert_close(prefill(batch), batch.expected())


def test_later_tokens_do_not_change_earlier_ones():
    batch = make_paged_batch([100], [100], 2, 1, 16, torch.float32)
    before = prefill(batch)
    last_block, last_offset = int(batch.block_tables[0, 99 // 16]), 99 % 16
    batch.kv.keys[last_block, :, :, last_offset] += 100
    batch.kv.values[last_block, :, last_offset] += 100
    after = prefill(batch)
    assert torch.equal(before[:99], after[:99])
    assert not torch.equal(before[99], after[99])


def test_attention_leaves_its_inputs_alone():
    batch = make_paged_batch([1, 1], [20, 33], 4, 2, 16, torch.float32)
    inputs = (batch.q, batch.kv.keys, batch.kv.values, batch.block_tables, batch.context_lens, batch.cu_seqlens_q)
    copies = [x.clone() for x in inputs]
    prefill(batch)
    decode(batch)
    assert all(torch.equal(x.nan_to_num(), copy.nan_to_num()) for x, copy in zip(inputs, copies, strict=True))


def test_a_batch_without_sequences_is_answered_with_nothing():
    batch = make_paged_batch([1], [5], 4, 2, 16, torch.float32)
    empty = decode_attention(batch.q[:0], batch.kv, batch.block_tables[:0], batch.context_lens[:0], batch.scale)
    assert empty.shape == (0, 4, 16)
