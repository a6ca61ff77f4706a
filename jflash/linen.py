"""Flax Linen over `jflash.attention`: a layer of its own, and `attention_fn` for Flax's layers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from . import heads
from .dropout import Dropout
from .masks import Mask
from .rotary import Rotary
from .stock import attention_fn as attention_fn


class FlashMultiHeadAttention(nn.Module):
    """Maps `[*B, T, F]` to `[*B, T, O]` by multi-head attention that never writes a T x t matrix.

    `jflash.nnx.FlashMultiHeadAttention` for Linen: the same settings, computation and initial
    values. The parameters have the names and shapes of `linen.MultiHeadDotProductAttention`, so that
    its checkpoints load here; channels are those of the first inputs.

    **Arguments:**

    - `num_heads`, `num_kv_heads`, `head_dim`, `out_features`, `use_bias`, `rotary`, `alibi`, `softcap`,
      `use_sinks`, `qk_norm`, `dropout_rate`, `dtype`, `param_dtype`, `kernel_init`, `bias_init`,
      `precision`, `implementation`: As in `jflash.nnx.FlashMultiHeadAttention`.
    - `deterministic`: Whether dropout is off; a call may override it.
    - `decode`: Whether calls append to the cache, the collection "cache". Initialise with inputs as
      long as a sequence may ever be: their shape makes it, as in Flax.
    - `sharding`: Names of mesh axes, or logical ones, for (features, heads, head size). Parameters
      come in `linen.Partitioned` boxes with them, as of `linen.with_partitioning`.

    **Raises:**

    ValueError, when called, where heads do not divide or a setting is none that there is.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    use_bias: bool = False
    rotary: Rotary | None = None
    alibi: bool = False
    softcap: float | None = None
    use_sinks: bool = False
    qk_norm: str | None = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    decode: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    sharding: tuple[str | None, str | None, str | None] | None = None
    precision: PrecisionLike = None
    implementation: str | None = None

    @nn.compact
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
        dropout_rng: Any = None,
    ) -> Float[Array, "*B T O"]:
        """Returns attention from rows of `x_q` to rows of `x_kv`, projected to `O` channels.

        As `jflash.nnx.FlashMultiHeadAttention.__call__`. With `decode` the T rows of `x_q`, any number,
        are appended to the cache (make the collection "cache" mutable) and attend causally to all that
        it holds.

        **Arguments:**

        - `x_kv`, `mask`, `positions`, `k_positions`, `bias`, `deterministic`: As there.
        - `dropout_rng`: The dropout key; `None` is `make_rng("dropout")`.

        **Raises:**

        As there: ValueError where there is no cache, or it is full, too. Inside `jax.jit` rows beyond
        its length give NaN.
        """
        if self.decode:
            heads.check_decoding(x_kv=x_kv, positions=positions, k_positions=k_positions)
            self._check_cache()
        if x_kv is None:
            x_kv = x_q
            k_positions = positions if k_positions is None else k_positions
        q, k, v, sinks = self._project(x_q, x_kv)
        operands: dict[str, Any] = dict(
            bias=bias, sinks=sinks, dropout=self._dropout(deterministic, dropout_rng)
        )
        if self.decode and self.has_variable("cache", "cached_key"):
            cache = self._cache(k)
            old = tuple(x.value for x in cache)
            out, new = heads.attend_cached(self, q, k, v, old, mask, **operands)
            for x, value in zip(cache, new):
                x.value = value
        else:
            if self.decode:
                self._cache(k)
                mask = None  # it refers to the rows of a cache, and only shapes matter here
            operands |= dict(positions=positions, k_positions=k_positions)
            out = heads.attend(self, q, k, v, mask, **operands)
        feature, head, channel = self._axes()
        features = x_q.shape[-1] if self.out_features is None else self.out_features
        return self._dense("out", features, (head, channel, feature), (feature,), axis=(-2, -1))(out)

    def _project(self, x_q, x_kv):
        """Returns (q, k, v, sinks): projected and normalised, and the sinks or None."""
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        heads.check_heads(x_q.shape[-1], self.num_heads, num_kv_heads, self.head_dim)
        heads.check_settings(self.dropout_rate, self.qk_norm, self.sharding)
        head_dim = x_q.shape[-1] // self.num_heads if self.head_dim is None else self.head_dim
        feature, head, channel = self._axes()
        into_heads = lambda name, count: self._dense(
            name, (count, head_dim), (feature, head, channel), (head, channel)
        )
        q = into_heads("query", self.num_heads)(x_q)
        k, v = (into_heads(name, num_kv_heads)(x_kv) for name in ("key", "value"))
        if self.qk_norm is not None:
            norm = partial(
                partial(nn.LayerNorm, use_bias=False) if self.qk_norm == "layer" else nn.RMSNorm,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                scale_init=self._annotated(nn.initializers.ones_init(), (channel,)),
            )
            q, k = norm(name="query_ln")(q), norm(name="key_ln")(k)
        sinks = None
        if self.use_sinks:
            init = self._annotated(nn.initializers.zeros_init(), (head,))
            sinks = self.param("sinks", init, (self.num_heads,), self.param_dtype)
        return q, k, v, sinks

    def _dense(self, name, features, kernel_axes, bias_axes, axis: Any = -1):
        return nn.DenseGeneral(
            features,
            axis=axis,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self._annotated(self.kernel_init, kernel_axes),
            bias_init=self._annotated(self.bias_init, bias_axes),
            precision=self.precision,
            name=name,
        )

    def _axes(self):
        return (None, None, None) if self.sharding is None else self.sharding

    def _annotated(self, init, axes):
        return init if self.sharding is None else nn.with_partitioning(init, axes)

    def _cache(self, k):
        """Returns the three variables of the cache; where they are new, empty and of the shape of k."""
        return (
            self.variable("cache", "cached_key", jnp.zeros, k.shape, k.dtype),
            self.variable("cache", "cached_value", jnp.zeros, k.shape, k.dtype),
            self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32),
        )

    def _check_cache(self):
        """Raises unless there is a cache, or this call makes it."""
        if not (self.has_variable("cache", "cached_key") or self.is_initializing()):
            raise ValueError(
                "`FlashMultiHeadAttention.__call__`: decode=True needs a cache. Got none; pass the "
                'collection "cache" that layer.init makes of inputs as long as a sequence may be.'
            )

    def _dropout(self, deterministic, key: jax.Array | None):
        """Returns the `Dropout` of this call, or None where none is due."""
        deterministic = self.deterministic if deterministic is None else deterministic
        if self.dropout_rate == 0 or deterministic:
            return None
        return Dropout(self.dropout_rate, self.make_rng("dropout") if key is None else key)
