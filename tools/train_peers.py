"""Trains examples/train_gpt.py with jax.nn's attention in the place of jflash's, to compare.

python tools/train_peers.py xla|cudnn [arguments of the example]
"""

import sys
from pathlib import Path
from unittest import mock

import jax

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_gpt  # noqa: E402


def main(implementation: str, arguments: list[str]) -> None:
    def attention(q, k, v, *_, **settings):  # the example's is causal, with nothing else
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    print(f"jax.nn, {implementation}")
    with mock.patch("jflash.heads.attention", attention):
        train_gpt.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
