"""Flax NNX over `jflash.attention`: a layer of its own, and `attention_fn` for Flax's layers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from . import heads
from .dropout import Dropout
from .masks import Mask
from .rotary import Rotary
from .stock import attention_fn as attention_fn

_LECUN_NORMAL = nnx.initializers.lecun_normal()  # the defaults of Flax's own layers
_ZEROS = nnx.initializers.zeros_init()


class FlashMultiHeadAttention(nnx.Module):
    """Maps `[*B, T, F]` to `[*B, T, O]` by multi-head attention that never writes a T x t matrix.

    Self attention, cross attention (`x_kv`), grouped-query attention (`num_kv_heads`), rotary
    embedding, ALiBi, normalised queries and keys, sinks, soft cap, dropout, and a cache for
    generation. Residuals, their normalisation and the MLP belong to the model. The parameters
    (`query`, `key`, `value`, `out`, each with `kernel` and perhaps `bias`, and `query_ln`, `key_ln`)
    have the names and shapes of `nnx.MultiHeadAttention`, so that its checkpoints load here.

    **Arguments:**

    - `in_features`: `F`, channels of `x_q`.
    - `num_heads`: `H`, query heads.
    - `num_kv_heads`: `h`, key and value heads; `None` is `H`. Must divide `H`.
    - `head_dim`: `D`; `None` is `in_features / num_heads`.
    - `out_features`: `O`; `None` is `in_features`.
    - `kv_features`: Channels of `x_kv`; `None` is `in_features`.
    - `use_bias`: Whether the four projections add a bias.
    - `rotary`: A `Rotary` to turn q and k by their positions, or `None`.
    - `alibi`: Whether distance lowers the scores, by the slopes of `jflash.alibi_slopes`.
    - `softcap`: Keeps scores within (-softcap, softcap), as `jflash.SoftCap`; `None` does not.
    - `use_sinks`: Whether each head learns a logit `sinks` that takes its share of the softmax.
    - `qk_norm`: "layer" or "rms" normalises each head of q and k, before rotary, by LayerNorm
      without bias (ViT-22B, https://arxiv.org/abs/2302.05442) or RMSNorm; `None` does not.
    - `dropout_rate`: Share of attention weights dropped in training, in [0, 1].
    - `deterministic`: Whether dropout is off. `train()` and `eval()` set it; a call may override
      it. (`jflash.attention`'s `deterministic`, about bitwise gradients, is another thing.)
    - `decode`: Whether calls append to the cache that `init_cache` makes; a call may override it.
    - `dtype`: Computes in this dtype; `None` promotes inputs and parameters.
    - `param_dtype`: Stores parameters in this dtype.
    - `kernel_init`, `bias_init`: Initialisers of all four projections.
    - `sharding`: Names of mesh axes, or logical ones, for the axes of all parameters: (features,
      heads, head size), such as `(None, "model", None)`. NNX shards by their `out_sharding` at
      once, so it wants a mesh (`jax.set_mesh`) where the layer is made.
    - `precision`: As in `jflash.attention`, for the projections too.
    - `implementation`: As in `jflash.attention`.
    - `rngs`: `params` initialises. With dropout, `dropout` is forked and kept for calls that
      bring no `rngs`, as in `nnx.MultiHeadAttention`.
    - `keep_rngs`: False keeps no key: the layer then has no state but parameters, and calls bring
      `rngs`.

    **Raises:**

    ValueError when heads do not divide, or a setting is none that there is.
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
        alibi: bool = False,
        softcap: float | None = None,
        use_sinks: bool = False,
        qk_norm: str | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        decode: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = _LECUN_NORMAL,
        bias_init: Initializer = _ZEROS,
        sharding: tuple[str | None, str | None, str | None] | None = None,
        precision: PrecisionLike = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        heads.check_heads(in_features, num_heads, num_kv_heads, head_dim)
        heads.check_settings(dropout_rate, qk_norm, sharding)
        head_dim = in_features // num_heads if head_dim is None else head_dim
        kv_features = in_features if kv_features is None else kv_features
        out_features = in_features if out_features is None else out_features

        self.in_features = in_features
        self.kv_features = kv_features
        self.cache_heads = (num_kv_heads, head_dim)
        self.rotary = rotary
        self.alibi = alibi
        self.softcap = softcap
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.decode = decode
        self.dtype = dtype
        self.precision = precision
        self.implementation = implementation

        feature, head, channel = (None, None, None) if sharding is None else sharding
        annotated: Any = lambda *names: {} if sharding is None else {"out_sharding": names}
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
        into_heads = partial(
            linear,
            kernel_metadata=annotated(feature, head, channel),
            bias_metadata=annotated(head, channel),
        )
        self.query = into_heads(in_features, (num_heads, head_dim))
        self.key = into_heads(kv_features, (num_kv_heads, head_dim))
        self.value = into_heads(kv_features, (num_kv_heads, head_dim))
        norm = lambda: nnx.data(None)
        if qk_norm is not None:
            norm = partial(
                partial(nnx.LayerNorm, use_bias=False) if qk_norm == "layer" else nnx.RMSNorm,
                head_dim,
                dtype=dtype,
                param_dtype=param_dtype,
                scale_metadata=annotated(channel),
                rngs=rngs,
            )
        self.query_ln, self.key_ln = norm(), norm()
        self.sinks = nnx.data(
            nnx.Param(jnp.zeros(num_heads, param_dtype), **annotated(head)) if use_sinks else None
        )
        self.out = linear(
            (num_heads, head_dim),
            out_features,
            axis=(-2, -1),
            kernel_metadata=annotated(head, channel, feature),
            bias_metadata=annotated(feature),
        )
        self.rngs = nnx.data(rngs.dropout.fork() if keep_rngs and dropout_rate > 0 else None)
        self.cached_key = self.cached_value = self.cache_index = nnx.data(None)

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
        decode: bool | None = None,
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
        - `decode`: True appends the T rows of `x_q`, any number, to the cache, and attends causally to
          all that it holds; `None` is the layer's `decode`. `mask` then refers to the cache's rows.
        - `rngs`: Source of the dropout key: an `Rngs` (its `dropout` stream), a stream or a key.
          `None` is the stream kept from the constructor.

        **Raises:**

        ValueError when features do not match, when dropout is on and there is no key, when there is
        no cache to decode with, or it is full. Inside `jax.jit` that cannot be known: rows beyond the
        cache's length give NaN.
        """
        decode = self.decode if decode is None else decode
        if decode:
            heads.check_decoding(x_kv=x_kv, positions=positions, k_positions=k_positions)
        if x_kv is None:
            x_kv = x_q
            k_positions = positions if k_positions is None else k_positions
        self._check_features(x_q, x_kv)
        dropout = self._dropout(deterministic, rngs)

        q, k, v = self.query(x_q), self.key(x_kv), self.value(x_kv)
        if self.query_ln is not None and self.key_ln is not None:
            q, k = self.query_ln(q), self.key_ln(k)
        operands: dict[str, Any] = dict(
            bias=bias, sinks=None if self.sinks is None else self.sinks[...], dropout=dropout
        )
        if decode:
            cache = self._cache()
            out, new = heads.attend_cached(self, q, k, v, tuple(x[...] for x in cache), mask, **operands)
            for x, value in zip(cache, new):
                x[...] = value
        else:
            operands |= dict(positions=positions, k_positions=k_positions)
            out = heads.attend(self, q, k, v, mask, **operands)
        return self.out(out)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype | None = None):
        """Makes an empty cache for decoding, `cached_key`, `cached_value` and `cache_index`.

        - `input_shape`: [*B, length, F], with as many rows as a sequence may ever have; that of
          `nnx.MultiHeadAttention.init_cache`.
        - `dtype`: Of the cached keys and values; `None` is the layer's `dtype`, or float32.
        """
        dtype = (self.dtype or jnp.float32) if dtype is None else dtype
        empty = lambda: nnx.Cache(jnp.zeros((*input_shape[:-1], *self.cache_heads), dtype))
        self.cached_key, self.cached_value = empty(), empty()
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ):
        """Sets what is given: what `nnx.view` calls.

        Args:
          deterministic: True turns dropout off.
          decode: True appends to the cache.
          batch_size: The batch axes of a new cache; with max_length.
          max_length: The length of a new cache; with batch_size.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, max_length, self.in_features))

    def _cache(self):
        cache: Any = (self.cached_key, self.cached_value, self.cache_index)
        if self.cached_key is None:
            raise ValueError(
                "`FlashMultiHeadAttention.__call__`: decode=True needs a cache. Got none; make one "
                "by layer.init_cache((*B, length, in_features)), or pass decode=False."
            )
        return cache

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
