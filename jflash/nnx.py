"""Flax NNX layer over `jflash.attention`: projections, rotary and attention, nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .api import attention
from .dropout import Dropout
from .masks import Mask
from .rotary import Rotary

_LECUN_NORMAL = nnx.initializers.lecun_normal()  # the defaults of Flax's own layers
_ZEROS = nnx.initializers.zeros_init()


class FlashMultiHeadAttention(nnx.Module):
    """Maps `[*B, T, F]` to `[*B, T, O]` by multi-head attention that never writes a T x t matrix.

    Self attention, cross attention (`x_kv`), grouped-query attention (`num_kv_heads`), rotary
    embedding and dropout. Normalisation, residuals, the MLP and the KV cache belong to the model.
    The parameters (`query`, `key`, `value`, `out`, each with `kernel` and perhaps `bias`) have
    the names and shapes of `nnx.MultiHeadAttention`, so that its checkpoints load here.

    **Arguments:**

    - `in_features`: `F`, channels of `x_q`.
    - `num_heads`: `H`, query heads.
    - `num_kv_heads`: `h`, key and value heads; `None` is `H`. Must divide `H`.
    - `head_dim`: `D`; `None` is `in_features / num_heads`.
    - `out_features`: `O`; `None` is `in_features`.
    - `kv_features`: Channels of `x_kv`; `None` is `in_features`.
    - `use_bias`: Whether the four projections add a bias.
    - `rotary`: A `Rotary` to turn q and k by their positions, or `None`.
    - `dropout_rate`: Share of attention weights dropped in training, in [0, 1].
    - `deterministic`: Whether dropout is off. `train()` and `eval()` set it; a call may override
      it. (`jflash.attention`'s `deterministic`, about bitwise gradients, is another thing.)
    - `dtype`: Computes in this dtype; `None` promotes inputs and parameters.
    - `param_dtype`: Stores parameters in this dtype.
    - `kernel_init`, `bias_init`: Initialisers of all four projections.
    - `precision`: As in `jflash.attention`, for the projections too.
    - `implementation`: As in `jflash.attention`.
    - `rngs`: `params` initialises. With dropout, `dropout` is forked and kept for calls that
      bring no `rngs`, as in `nnx.MultiHeadAttention`.
    - `keep_rngs`: False keeps no key: the layer then has no state but parameters, and calls bring
      `rngs`.

    **Raises:**

    ValueError when heads do not divide, or `dropout_rate` is not a probability.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        kv_features: int | None = None,
        use_bias: bool = False,
        rotary: Rotary | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = _LECUN_NORMAL,
        bias_init: Initializer = _ZEROS,
        precision: PrecisionLike = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(in_features, num_heads, num_kv_heads, head_dim)
        if not 0 <= dropout_rate <= 1:  # also refuses NaN
            raise ValueError(
                f"`FlashMultiHeadAttention(dropout_rate=...)`: dropout_rate is a probability, so "
                f"it lies in [0, 1]. Got {dropout_rate}; 0 turns dropout off."
            )
        head_dim = in_features // num_heads if head_dim is None else head_dim
        kv_features = in_features if kv_features is None else kv_features
        out_features = in_features if out_features is None else out_features

        self.in_features = in_features
        self.kv_features = kv_features
        self.rotary = rotary
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.precision = precision
        self.implementation = implementation

        linear = partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            precision=precision,
            rngs=rngs,
        )
        self.query = linear(in_features, (num_heads, head_dim))
        self.key = linear(kv_features, (num_kv_heads, head_dim))
        self.value = linear(kv_features, (num_kv_heads, head_dim))
        self.out = linear((num_heads, head_dim), out_features, axis=(-2, -1))
        self.rngs = nnx.data(rngs.dropout.fork() if keep_rngs and dropout_rate > 0 else None)

    def __call__(
        self,
        x_q: Float[Array, "*B T F"],
        x_kv: Float[Array, "*B t f"] | None = None,
        mask: Mask | ArrayLike | None = None,
        *,
        positions: ArrayLike | None = None,
        k_positions: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> Float[Array, "*B T O"]:
        """Returns attention from rows of `x_q` to rows of `x_kv`, projected to `O` channels.

        Nothing is masked unless `mask` says so: pass `Causal()` for a decoder and
        `Causal() & Segments(ids)` for packed documents. Positions never stand in for segment ids:
        ones that restart within a row separate nothing.

        **Arguments:**

        - `x_kv`: Keys and values are projected from it; `None` is self attention.
        - `mask`: A jflash mask, or a boolean array as for `jflash.attention`.
        - `positions`: `[T]`, or `[*B, T]` with 1 for any axis of `*B`: where the rows of `x_q`
          stand, for rotary and for masks that compare positions (`Causal`, `Window`). `None` is
          bottom-right: row `i` stands at `i + t - T`, which is `i` in self attention.
        - `k_positions`: The same for keys, `[t]` or `[*B, t]`. `None` is `positions` in self
          attention, else `arange(t)`.
        - `bias`: Added to the scores, as in `jflash.attention`.
        - `deterministic`: True leaves dropout out; `None` is the layer's `deterministic`.
        - `rngs`: Source of the dropout key: an `Rngs` (its `dropout` stream), a stream or a key.
          `None` is the stream kept from the constructor.

        **Raises:**

        ValueError when features do not match, or when dropout is on and there is no key.
        """
        if x_kv is None:
            x_kv = x_q
            k_positions = positions if k_positions is None else k_positions
        self._check_features(x_q, x_kv)
        dropout = self._dropout(deterministic, rngs)

        batch_axes = x_q.ndim - 2
        positions = _with_batch_axes(positions, batch_axes)
        k_positions = _with_batch_axes(k_positions, batch_axes)

        q, k, v = self.query(x_q), self.key(x_kv), self.value(x_kv)
        if self.rotary is not None:
            T, t = q.shape[-3], k.shape[-3]
            q = self.rotary(q, jnp.arange(t - T, t) if positions is None else positions)
            k = self.rotary(k, jnp.arange(t) if k_positions is None else k_positions)
        out = attention(
            q,
            k,
            v,
            mask,
            bias=bias,
            dropout=dropout,
            q_positions=positions,
            k_positions=k_positions,
            precision=self.precision,
            implementation=self.implementation,
        )
        return self.out(out)

    def set_view(self, deterministic: bool | None = None):
        """Sets `deterministic` where given: what `nnx.view` calls.

        Args:
          deterministic: True turns dropout off.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout(self, deterministic, rngs):
        """Returns the `Dropout` of this call, or None where none is due."""
        deterministic = self.deterministic if deterministic is None else deterministic
        if self.dropout_rate == 0 or deterministic:
            return None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError(
                f"`FlashMultiHeadAttention.__call__`: dropout_rate={self.dropout_rate} and "
                f"deterministic=False need a key, and the layer keeps none (keep_rngs=False). Got "
                f"rngs=None. Pass rngs=nnx.Rngs(dropout=0), or turn dropout off by eval() or "
                f"deterministic=True."
            )
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.dropout
        key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
        return Dropout(self.dropout_rate, key)

    def _check_features(self, x_q, x_kv):
        """Raises unless the inputs have the channels that the projections were made for."""
        for name, x, argument, features in (
            ("x_q", x_q, "in_features", self.in_features),
            ("x_kv", x_kv, "kv_features", self.kv_features),
        ):
            if x.shape[-1] != features:
                raise ValueError(
                    f"`FlashMultiHeadAttention.__call__`: {name} must have {features} channels, "
                    f"because its projection was made with {argument}={features}. Got "
                    f"{name}.shape={x.shape} in the order (*B, rows, channels); make the layer "
                    f"with {argument}={x.shape[-1]}. Without x_kv, keys and values come from x_q."
                )


def _check_heads(in_features, num_heads, num_kv_heads, head_dim):
    """Raises unless the heads share out the channels and each other."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"`FlashMultiHeadAttention(num_heads, num_kv_heads=...)`: each key head must serve the "
            f"same number of query heads, at least one, so num_kv_heads must divide num_heads. Got "
            f"num_heads={num_heads} and num_kv_heads={num_kv_heads}."
        )
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            f"`FlashMultiHeadAttention(in_features, num_heads)`: without head_dim, heads share "
            f"in_features evenly. Got in_features={in_features} and num_heads={num_heads}; pass "
            f"head_dim."
        )


def _with_batch_axes(positions, batch_axes):
    """Returns [T] positions as `attention` takes them, [1, ..., 1, T], and others as given."""
    if positions is None:
        return None
    positions = jnp.asarray(positions)
    if positions.ndim != 1:
        return positions
    return positions.reshape((1,) * batch_axes + positions.shape)
