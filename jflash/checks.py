"""What the checks of arguments share: how an error reads, and how an argument becomes an array."""

from typing import Any

import jax
import jax.numpy as jnp


def check(holds: bool, error: type, argument: str, rule: str, got: str, fix: str = "") -> None:
    """Raises `error` unless `holds`; the message names the argument, its rule, what was got, the fix."""
    if not holds:
        raise error(f"`{argument}` {rule}. Got {got}.{' ' + fix if fix else ''}")


def kind(x: Any) -> str:
    """What `x` is, in the words of an error."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"an array of {x.dtype} and shape {tuple(x.shape)}"
    return f"{x!r}" if isinstance(x, int | float | str | bool) else f"a {type(x).__name__}"


def as_array(argument: str, x: Any) -> jax.Array:
    """`x` as a JAX array; TypeError where it is none."""
    try:
        if isinstance(x, str | bytes):  # which NumPy would take as an array of characters
            raise TypeError
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{argument}` must be an array. Got {kind(x)}.") from error
