"""What benchmarks of single ops are told of a model's layer, and of a call."""

# pyright: basic

import argparse
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """rows: sequences of a decode step;  context: tokens that each of them has."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    rows: int
    context: int


def add_sizes(parser: argparse.ArgumentParser, defaults: Sizes) -> None:
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default: {value}")


def sizes_of(options: argparse.Namespace) -> Sizes:
    return Sizes(**{name: getattr(options, name) for name in Sizes.__dataclass_fields__})
