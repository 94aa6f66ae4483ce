"""Choose one token from each row of logits, on a GPU; contract and reference: kernels/sample.py.

Nothing is sorted. What may be drawn is a prefix of the tokens in order of probability, so the most likely token with
its noise is looked for among all, and whether it is in the prefix follows from how many tokens and how much mass come
before it. If it is not, neither is any token behind it, and the next one is looked for among those before it. That
ends with the very token that truncation and then drawing would give, mostly at the first.
Source: the idea is that of rejection sampling without sorting (FlashInfer, 2025), here for noise that is fixed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sample import Draws
from kernels.triton.gpu import Gpu


@triton.jit
def philox_words(seed, position, groups):
    """kernels/philox.py's words of tokens 4 * group … 4 * group + 3: [GROUPS, 4] uint32. seed, position: int64."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zeros = tl.zeros_like(groups).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, groups.to(tl.uint32), zeros + low, zeros + high, zeros)
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(pairs, (groups.shape[0], 4))


@triton.jit
def gumbel_noise(words):
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def load_logits(logits_ptr, first, vocab_size, BLOCK: tl.constexpr):
    """A tile of a row: (logits, [BLOCK / 4, 4], -inf past the end; groups, [BLOCK / 4]; token ids)."""
    groups = first // 4 + tl.arange(0, BLOCK // 4)
    ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")), groups, ids


@triton.jit
def find_max(logits_ptr, vocab_size, BLOCK: tl.constexpr):
    """The largest logit and the first token that has it."""
    best, best_id = float("-inf"), 0
    for first in range(0, vocab_size, BLOCK):
        logits, _, ids = load_logits(logits_ptr, first, vocab_size, BLOCK)
        tile_best = tl.max(logits)
        if tile_best > best:
            best = tile_best
            best_id = tl.min(tl.where(logits == tile_best, ids, vocab_size))
    return best, best_id


@triton.jit
def comes_before(logits, ids, logit, token_id):
    """In order of probability, equal ones by id."""
    return (logits > logit) | ((logits == logit) & (ids < token_id))


@triton.jit
def find_noisy_max(logits_ptr, vocab_size, seed, position, top, temperature, bound, bound_id, BLOCK: tl.constexpr):
    """Of the tokens before the bound, the first with the largest sum of logit and noise: (its logit, its id)."""
    best, best_logit, best_id = float("-inf"), bound, bound_id
    for first in range(0, vocab_size, BLOCK):
        logits, groups, ids = load_logits(logits_ptr, first, vocab_size, BLOCK)
        noise = gumbel_noise(philox_words(seed, position, groups))
        noisy = tl.div_rn(logits - top, temperature) + noise
        noisy = tl.where(comes_before(logits, ids, bound, bound_id), noisy, float("-inf"))
        tile_best = tl.max(noisy)
        if tile_best > best:
            best = tile_best
            best_id = tl.min(tl.where(noisy == tile_best, ids, vocab_size))
            best_logit = tl.max(tl.where(ids == best_id, logits, float("-inf")))
    return best_logit, best_id


@triton.jit
def count_before(logits_ptr, vocab_size, top, temperature, min_p, logit, token_id, BLOCK: tl.constexpr):
    """Of the tokens before one: how many there are, and the mass of those that min_p leaves, in fp64."""
    count, mass = 0, tl.full((), 0.0, tl.float64)
    for first in range(0, vocab_size, BLOCK):
        logits, _, ids = load_logits(logits_ptr, first, vocab_size, BLOCK)
        is_before = comes_before(logits, ids, logit, token_id)
        weights = tl.exp(tl.div_rn(logits - top, temperature))
        count += tl.sum(is_before.to(tl.int32))
        mass += tl.sum(tl.where(is_before & (weights >= min_p), weights, 0.0).to(tl.float64))
    return count, mass


@triton.jit
def from_order(order):
    """The fp32 value whose place among all is `order`: their bits are such places but for the sign."""
    bits = order.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def find_kth(logits_ptr, vocab_size, top_k, BLOCK: tl.constexpr):
    """The top_k-th largest logit, by halving the range of values, and how many of the first top_k are equal to it."""
    low = tl.full((), -2139095041, tl.int64)  # the place of -inf, which all reach
    high = tl.full((), 2139095041, tl.int64)  # beyond that of inf, which none does
    num_above = 0
    while high - low > 1:
        middle = (low + high) >> 1
        value = from_order(middle)
        count = 0
        for first in range(0, vocab_size, BLOCK):
            logits, _, _ = load_logits(logits_ptr, first, vocab_size, BLOCK)
            count += tl.sum((logits >= value).to(tl.int32))
        if count >= top_k:
            low = middle
        else:
            high = middle
            num_above = count
    return from_order(low), top_k - num_above


@triton.jit
def mass_to_reach(logits_ptr, vocab_size, top, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """top_p of the mass that top_k and min_p leave; infinite where top_p is off."""
    mass = tl.full((), float("inf"), tl.float64)
    if top_p < 1.0:
        logit, num_equal = float("-inf"), 0
        if top_k < vocab_size:
            logit, num_equal = find_kth(logits_ptr, vocab_size, top_k, BLOCK)
        # Tokens before the first one that could have this logit are all above it.
        _, mass = count_before(logits_ptr, vocab_size, top, temperature, min_p, logit, 0, BLOCK)
        weight = tl.exp(tl.div_rn(logit - top, temperature))
        if weight >= min_p:
            mass += weight.to(tl.float64) * num_equal
        mass *= top_p.to(tl.float64)
    return mass


@triton.jit
def sample_kernel(
    logits_ptr,  # [n, vocab_size], rows logits_stride apart
    temperature_ptr,  # [n]; the others too
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    out_ptr,
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    # grid: (n,)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    temperature = tl.load(temperature_ptr + row)
    top, token_id = find_max(logits_ptr, vocab_size, BLOCK)
    if temperature > 0:
        temperature = tl.maximum(temperature, 1.1754943508222875e-38)
        top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).to(tl.int32)
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        target = mass_to_reach(logits_ptr, vocab_size, top, temperature, top_k, top_p, min_p, BLOCK)
        is_whole = (top_k == vocab_size) & (top_p >= 1.0) & (min_p <= 0.0)
        logit, token_id, is_searching = float("-inf"), vocab_size, True
        while is_searching:
            logit, token_id = find_noisy_max(
                logits_ptr, vocab_size, seed, position, top, temperature, logit, token_id, BLOCK
            )
            is_searching = False
            if not is_whole:
                count, mass = count_before(logits_ptr, vocab_size, top, temperature, min_p, logit, token_id, BLOCK)
                weight = tl.exp(tl.div_rn(logit - top, temperature))
                is_kept = (weight >= min_p) & (count < top_k) & (mass < target)
                is_searching = (count > 0) & (is_kept == 0)
    tl.store(out_ptr + row, token_id)


def sample(logits: Tensor, draws: Draws, gpu: Gpu) -> Tensor:
    """A program a row, and as many passes over it as it takes.

    Bytes: 4 * n * vocab_size a pass: one of a greedy row, two of one that is not truncated, else about four, and with
    both top_k and top_p 32 more. FLOPs: some 40 a token for noise, 10 for counting. Bound by the L2 cache, which a row
    does not leave between passes, and with few rows by what one processor gets out of it.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        sizes, options = gpu.tile("sample")
        columns = [column.contiguous() for column in draws]
        sample_kernel[(num_rows,)](logits, *columns, out, logits.stride(0), vocab_size, **sizes, **options)
    return out
