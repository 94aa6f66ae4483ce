"""What ops must move and multiply, counted by hand for sizes that are small enough."""

import pytest

from kernels import work
from kernels.work import PEAKS, Peaks, Work, peaks_of


def test_a_norm_reads_and_writes_each_value_and_with_a_residual_twice() -> None:
    assert work.rms_norm(3, 10, 2, with_residual=False) == Work(3 * 10 * 2 * 2, 3 * 10 * 4)
    assert work.rms_norm(3, 10, 2, with_residual=True) == Work(3 * 10 * 2 * 4, 3 * 10 * 4)


def test_a_gated_activation_reads_both_halves_and_writes_one() -> None:
    assert work.silu_and_mul(3, 10, 2) == Work((20 + 10) * 3 * 2, 5 * 30)


def test_rope_reads_and_writes_queries_and_keys_and_writes_keys_and_values_to_the_cache() -> None:
    read, written, cached = (4 + 2 + 2) * 8, (4 + 2) * 8, (2 + 2) * 8
    needed = work.rope_and_cache(3, heads=4, kv_heads=2, head_dim=8, itemsize=2)
    assert needed == Work(3 * 2 * (read + written + cached), 3 * 3 * (4 + 2) * 8)


def test_decoding_reads_each_key_and_value_once_for_all_heads_that_share_it() -> None:
    assert work.decode_attention([5, 7], heads=4, kv_heads=2, head_dim=8, itemsize=2) == Work(
        2 * (5 + 7) * 2 * 8 * 2, 2 * 2 * (5 + 7) * 4 * 8
    )


def test_a_prompt_multiplies_each_token_with_those_up_to_it() -> None:
    needed = work.prefill_attention([1, 3], heads=4, kv_heads=2, head_dim=8, itemsize=2)
    pairs = 1 + (1 + 2 + 3)
    queries_and_out, keys_and_values = 2 * 4 * 4 * 8, 2 * 4 * 2 * 8
    assert needed == Work((queries_and_out + keys_and_values) * 2, 2 * 2 * pairs * 4 * 8)


@pytest.mark.parametrize(("quantization", "group_bytes"), [("int8", 32 + 4), ("int4", 16 + 4)])
def test_a_group_of_weights_has_a_scale_and_an_offset(quantization: str, group_bytes: int) -> None:
    needed = work.quantised_linear(3, in_size=64, out_size=10, quantization=quantization, itemsize=2)
    assert needed == Work(10 * 2 * group_bytes + 3 * (64 + 10) * 2, 2 * 3 * 64 * 10)


def test_a_draw_reads_the_logits_in_every_pass_and_a_greedy_choice_has_no_noise() -> None:
    assert work.sample(2, 100, num_passes=1) == Work(2 * 100 * 4, 0)
    assert work.sample(2, 100, num_passes=4) == Work(4 * 2 * 100 * 4, 40 * 2 * 100)


def test_blocks_are_read_and_written() -> None:
    assert work.copy_blocks(1000) == Work(2000)


def test_the_roofline_is_whatever_takes_longer() -> None:
    peaks = Peaks(gbps=1000, tflops=100, tflops_fp32=10)
    assert peaks.roofline_s(Work(2e12, 1e12), itemsize=2) == 2.0
    assert peaks.roofline_s(Work(1e9, 4e14), itemsize=2) == 4.0
    assert peaks.roofline_s(Work(1e9, 4e14), itemsize=4) == 40.0


def test_a_device_is_known_by_the_longest_name_that_its_own_begins_with() -> None:
    assert peaks_of("NVIDIA H200") == PEAKS["NVIDIA H200"]
    assert peaks_of("NVIDIA H200 NVL") == PEAKS["NVIDIA H200 NVL"]
    assert peaks_of("AMD Instinct MI300X OAM") == PEAKS["AMD Instinct MI300X"]
    assert peaks_of("NVIDIA GeForce RTX 4090") is None
