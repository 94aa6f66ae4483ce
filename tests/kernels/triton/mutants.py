"""Bugs planted in the kernels one at a time, to see that the tests find them: `make kernel-mutants`.

A bug is a change of one place in a copy of what the tests need. None writes outside of tensors or goes on for ever.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parents[3]
COPIED = ("kernels", "tests/kernels", "tests/conftest.py", "pyproject.toml")
TESTS_FAILED = 1
MAX_TEST_S = 600
TESTS = {
    "attention": "test_attention",
    "decode_attention": "test_attention",
    "gated": "test_layer_ops",
    "gelu_and_mul": "test_layer_ops",
    "prefill_attention": "test_attention",
    "quantised_linear": "test_quantised_linear",
    "rms_norm": "test_layer_ops",
    "rope_and_cache": "test_layer_ops",
    "sample": "test_sample",
    "silu_and_mul": "test_layer_ops",
    "staging": "test_layer_ops",
}
"""A kernel's file -> the tests that have to find what is wrong in it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """file: of TESTS;  text: what its replacement takes the place of, there once;  tests: by a part of their names."""

    file: str
    name: str
    text: str
    replacement: str
    tests: str = ""

    @property
    def path(self) -> str:
        return f"kernels/triton/{self.file}.py"


class Outcome(Enum):
    FOUND = "found"
    SURVIVED = "SURVIVED"
    STALE = "NOT THERE: its text is not in the file once"
    BROKEN = "NOT TRIED: its tests did not run"


MUTANTS = (
    Mutant(
        "attention",
        "see the next token",
        "tokens[None, :] <= last_keys[:, None]",
        "tokens[None, :] <= last_keys[:, None] + 1",
    ),
    Mutant(
        "attention",
        "see one key before the window",
        "tokens[None, :] > last_keys[:, None] - window",
        "tokens[None, :] >= last_keys[:, None] - window",
        "in_a_window",
    ),
    Mutant(
        "attention",
        "begin with a maximum that gives NaN",
        "row_sum - 3.4028234663852886e38",
        'row_sum - float("inf")',
        "in_a_window",
    ),
    Mutant("attention", "do not rescale the sum", "row_sum * correction +", "row_sum +"),
    Mutant("attention", "do not rescale the values", "*(acc * correction[:, None],", "*(acc,"),
    Mutant("attention", "do not scale scores", "scores *= scale_log2", "scores *= 1"),
    Mutant(
        "attention",
        "take even dimensions of keys for odd ones",
        "tl.dot(q_high, k_high, tl.dot(q_low, k_low))",
        "tl.dot(q_high, k_low, tl.dot(q_low, k_high))",
    ),
    Mutant("attention", "drop odd tokens", "tl.dot(high, v_high, tl.dot(low, v_low, acc))", "tl.dot(low, v_low, acc)"),
    Mutant(
        "attention",
        "let NaN of the slot behind the last token in",
        "(rows * 2 + 1 < num_keys)",
        "(rows * 2 + 1 <= num_keys)",
    ),
    Mutant(
        "attention",
        "read a word of keys as many apart as there are dimensions",
        "words[:, None] * BLOCK_SIZE +",
        "words[:, None] * HEAD_DIM // PAIR +",
    ),
    Mutant("attention", "take another block's slots", "tokens % BLOCK_SIZE", "tokens % (BLOCK_SIZE // 2 + 1)"),
    Mutant("attention", "halve what a cap takes off", "(1 - 2 / (1 + ", "(1 - 1 / (1 + ", "softcap"),
    Mutant(
        "attention",
        "begin one key behind the window's first",
        "position + 1 - window",
        "position + 2 - window",
        "in_a_window",
    ),
    Mutant(
        "attention",
        "drop the window's first tile",
        "*(start, whole_start,",
        "*(whole_start, whole_start,",
        "in_a_window",
    ),
    Mutant(
        "attention", "forget the maximum in a part's weight", "row_max + tl.log2(row_sum)", "tl.log2(row_sum)", "parts"
    ),
    Mutant(
        "decode_attention",
        "begin splits at the first key of all",
        "start = first_tile * BLOCK_N + split * num_keys",
        "start = split * num_keys",
        "in_a_window",
    ),
    Mutant(
        "decode_attention",
        "take the window's first tile for whole",
        "tl.cdiv(first_key, BLOCK_N) * BLOCK_N), whole_end",
        "first_key // BLOCK_N * BLOCK_N), whole_end",
        "in_a_window",
    ),
    Mutant(
        "decode_attention", "let splits overlap", "tl.minimum(start + num_keys, context_len)", "context_len", "parts"
    ),
    Mutant(
        "decode_attention", "write all splits to one place", ") * num_splits + split\n", ") * num_splits\n", "parts"
    ),
    Mutant(
        "decode_attention",
        "give all splits the same weight",
        "tl.exp2(lse - tl.max(lse, 0))",
        'tl.where(lse > float("-inf"), 1.0, 0.0)',
        "parts",
    ),
    Mutant(
        "decode_attention",
        "leave out the last key",
        "context_len - 1, tl.int32",
        "context_len - 2, tl.int32",
        "decode_of",
    ),
    Mutant(
        "prefill_attention", "see a key too many in whole tiles", "(prefix + first + 1) //", "(prefix + first + 2) //"
    ),
    Mutant(
        "prefill_attention",
        "begin one key behind the window's first",
        "first_seen(prefix + first, window)",
        "first_seen(prefix + first + 1, window)",
        "in_a_window",
    ),
    Mutant(
        "prefill_attention",
        "take tiles for whole that only the first row sees",
        "first_seen(end - 1, window)",
        "first_seen(prefix + first, window)",
        "in_a_window",
    ),
    Mutant(
        "prefill_attention", "forget the prefix", "tl.minimum(prefix + tokens, end - 1)", "tl.minimum(tokens, end - 1)"
    ),
    Mutant(
        "prefill_attention",
        "put rows as far apart as one KV head's",
        "row_ids * num_kv_heads * GROUP + heads",
        "row_ids * GROUP + heads",
    ),
    Mutant(
        "prefill_attention",
        "let unused rows of a tile write to the next one",
        "(rows < TILE_TOKENS * GROUP) & (tokens < num_tokens)",
        "tokens < num_tokens",
    ),
    Mutant("rms_norm", "count the padding", "/ HIDDEN_SIZE + eps", "/ BLOCK + eps"),
    Mutant("rms_norm", "take the residual's rows where x has them", "row * residual_stride", "row * x_stride"),
    Mutant("rms_norm", "drop eps", "/ HIDDEN_SIZE + eps", "/ HIDDEN_SIZE"),
    Mutant("rms_norm", "drop the residual", "(x.to(tl.float32) + residual.to(tl.float32))", "x.to(tl.float32)"),
    Mutant("rms_norm", "drop the weight", "normalized * weight", "normalized"),
    Mutant("rope_and_cache", "turn the other way", "return first * cos - second", "return first * cos + second"),
    Mutant("rope_and_cache", "take cosines for sines", "angles + HALF + dims", "angles + dims"),
    Mutant(
        "rope_and_cache",
        "put odd dimensions of keys on even ones",
        "late // PAIR * (BLOCK_SIZE * PAIR) + late % PAIR",
        "late // PAIR * (BLOCK_SIZE * PAIR)",
    ),
    Mutant("rope_and_cache", "put odd tokens' values on even ones", "+ offset % PAIR + dims", "+ dims"),
    Mutant("rope_and_cache", "read the values of the first token", "v_ptr + token * v_stride", "v_ptr"),
    Mutant(
        "sample",
        "take the last of equal logits",
        "tl.min(tl.where(logits == tile_best, ids, vocab_size))",
        "tl.max(tl.where(logits == tile_best, ids, 0))",
    ),
    Mutant("sample", "keep one token more than top_k", "(count < top_k)", "(count <= top_k)"),
    Mutant("sample", "count those above as equal ones", "top_k - num_above", "num_above"),
    Mutant("sample", "count equal logits once", "weight.to(tl.float64) * num_equal", "weight.to(tl.float64)"),
    Mutant("sample", "reach for the whole mass", "mass *= top_p.to(tl.float64)", "mass *= 1.0"),
    Mutant("sample", "count mass that min_p takes away", "is_before & (weights >= min_p)", "is_before"),
    Mutant(
        "sample",
        "give tokens each other's noise",
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
    ),
    Mutant("sample", "drop the position's upper half", "(position >> 32)", "(position >> 33)"),
    Mutant(
        "sample", "draw without temperature", "tl.div_rn(logits - top, temperature) + noise", "logits - top + noise"
    ),
    Mutant("gated", "leave the last column", "columns < size", "columns < size - 1"),
    Mutant(
        "gated",
        "read the second half's rows half as far apart",
        "_places(x_ptr + size, 2 * size,",
        "_places(x_ptr + size, size,",
    ),
    Mutant("gated", "write every tile to the first one's place", "tl.program_id(1) * BLOCK + tl.arange", "tl.arange"),
    Mutant("silu_and_mul", "turn the sign", "tl.exp(-gate)", "tl.exp(gate)"),
    Mutant("silu_and_mul", "take the sigmoid", "gate / (1 +", "1 / (1 +"),
    Mutant("silu_and_mul", "divide by one more", "gate / (1 +", "gate / (2 +"),
    Mutant("gelu_and_mul", "take half of the sigmoid's argument", "1.5957691216057308", "0.7978845608028654"),
    Mutant("gelu_and_mul", "take the square for the cube", "gate * gate * gate)", "gate * gate)"),
    Mutant("gelu_and_mul", "drop the cube", "(gate + 0.044715 * gate * gate * gate)", "gate"),
    Mutant("quantised_linear", "let NaN behind a row in", "(inputs < in_size)", "(inputs <= in_size)"),
    Mutant("quantised_linear", "forget the offsets", " + offset[:, :, None]", ""),
    Mutant(
        "quantised_linear",
        "read rows without what lies between them",
        "row_ptrs = x_ptr + rows.to(tl.int64) * x_stride",
        "row_ptrs = x_ptr + rows.to(tl.int64) * in_size",
    ),
    Mutant("quantised_linear", "take a group's halves for neighbours", "inputs + GROUP_BYTES,", "inputs + 1,"),
    Mutant(
        "quantised_linear",
        "forget the groups before",
        "add_products(acc, row_ptrs, is_row, inputs, in_size, q & 15,",
        "add_products(acc * 0, row_ptrs, is_row, inputs, in_size, q & 15,",
    ),
    Mutant(
        "quantised_linear",
        "do not add up integers of 8 bits",
        "tl.dot(x, tl.trans(weights.to(x.dtype)), acc,",
        "tl.dot(x, tl.trans(weights.to(x.dtype)), acc * 0,",
    ),
    Mutant("quantised_linear", "take the bias off", "acc += tl.load(bias_ptr", "acc -= tl.load(bias_ptr"),
    Mutant(
        "staging", "take blocks in their order", "tl.load(block_ids_ptr + row) * block_stride", "row * block_stride"
    ),
    Mutant("staging", "put rows a tile apart", "row * num_values + values", "row * BLOCK + values"),
    Mutant("staging", "leave the last value", "values < num_values", "values < num_values - 1"),
    Mutant("staging", "begin at the first head", "heads = blocks[:, first_head:]", "heads = blocks"),
)


def try_mutant(mutant: Mutant) -> Outcome:
    source = (ROOT / mutant.path).read_text()
    if source.count(mutant.text) != 1:
        return Outcome.STALE
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_tree(copy)
        (copy / mutant.path).write_text(source.replace(mutant.text, mutant.replacement))
        return run_tests(copy, f"tests/kernels/triton/{TESTS[mutant.file]}.py", mutant.tests)


def copy_tree(to: Path) -> None:
    for name in COPIED:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)


def run_tests(folder: Path, path: str, names: str) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", path, "-k", names]
    environment = os.environ | {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=MAX_TEST_S, check=False)
    return {0: Outcome.SURVIVED, TESTS_FAILED: Outcome.FOUND}.get(done.returncode, Outcome.BROKEN)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.triton.mutants", description=__doc__)
    parser.add_argument("--files", nargs="+", choices=TESTS, default=list(TESTS), help="only bugs in these")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    mutants = [mutant for mutant in MUTANTS if mutant.file in options.files]
    num_found = 0
    with ThreadPoolExecutor(options.processes) as pool:
        for mutant, outcome in zip(mutants, pool.map(try_mutant, mutants), strict=True):
            num_found += outcome is Outcome.FOUND
            say(f"{mutant.file + ': ' + mutant.name:70} {outcome.value}")
    say(f"{num_found} of {len(mutants)} found")
    return 0 if num_found == len(mutants) else 1


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
