"""The functions users call: docstring, validate, choose, call."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from . import backends, flags, packing, partitioning, rules, validate
from .checks import as_array
from .dropout import Dropout
from .masks import Causal, Mask, Moved
from .validate_fields import as_mask


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: Mask | ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    score_mod: Any = None,
    sinks: ArrayLike | None = None,
    dropout: Dropout | None = None,
    q_positions: ArrayLike | None = None,
    k_positions: ArrayLike | None = None,
    precision: Any = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*batch T H d"]:
    """Attention of `q` to `k` and `v`: softmax(scale * q·kᵀ + bias, masked) v.

    Exact and linear in memory, forward and backward: no array of T·t elements exists beyond what
    is passed. FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithms 1 and 2).

    **Arguments:**

    Upper case is the query side, lower case the key side. There may be no batch axis or several.

    - `q`: [*batch, T, H, D]. `k`: [*batch, t, h, D]. `v`: [*batch, t, h, d]. All of one dtype:
      float16, bfloat16 or float32. `H % h == 0`: query head n uses key head n // (H / h)
      (grouped-query attention). `d` may differ from `D`.
    - `mask`: Which keys a query sees: `Causal()`, `Window(left, right)`, `Segments(ids)`,
      `Prefix(n)`, `Function(fn)`, a boolean array (`Dense`), and combinations by `&`, `|`, `~`.
      None shows everything.
    - `bias`: Added to the scaled scores. Any float dtype, broadcastable to [*batch, H, T, t]; its
      gradient has its own shape and dtype.
    - `scale`: Factor of q·k, 1/sqrt(D) by default. A number, or an array of shape ().
    - `score_mod`: `SoftCap(cap)`, `Alibi(slopes)`, a function `mod(s, b, h, q_pos, k_pos)` of
      scalars, or a tuple of these, applied left to right after the bias and before the mask.
    - `sinks`: [H]. Each row's denominator gains exp(sink), as if one more key had that score and a
      value of 0.
    - `dropout`: `Dropout(rate, key)`; None in evaluation.
    - `q_positions`, `k_positions`: Integers [*batch or 1, T] and [*batch or 1, t], for masks and
      score modifiers. By default bottom-right aligned: query row i stands at i + t - T, key row
      j at j. (Both `dot_product_attention`s, of `jax.nn` and ours, are aligned top-left; the same for T = t.)
    - `precision`: Of the products, as in `jax.numpy.einsum`. By default float32 inputs are
      computed as float32, not TF32, unless `jax.default_matmul_precision` says otherwise.
    - `deterministic`: True gives bitwise equal gradients from run to run on every implementation.
      On `xla` and `reference` they always are.
    - `implementation`: None for the best one, or a name; a named one runs or raises. See
      `jflash.explain`.

    **Returns:**

    `out` [*batch, T, H, d], in the dtype of the inputs. Softmax and sums are float32 whatever the
    inputs. A row that sees no key gives 0 and takes no part in any gradient. Keys that no query
    sees, and queries that see no key, may hold NaN without effect.

    **Raises:**

    ValueError for shapes and values that do not fit, TypeError for kinds that do not,
    NotImplementedError if a named implementation cannot take the call.

    >>> import jax.numpy as jnp, jflash
    >>> q = k = v = jnp.ones((1, 8, 4, 64))
    >>> jflash.attention(q, k, v, jflash.Causal()).shape
    (1, 8, 4, 64)
    """
    return _attend("attention", locals())[0]


def attention_with_lse(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: Mask | ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    score_mod: Any = None,
    sinks: ArrayLike | None = None,
    dropout: Dropout | None = None,
    q_positions: ArrayLike | None = None,
    k_positions: ArrayLike | None = None,
    precision: Any = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch T H d"], Float[Array, "*batch H T"]]:
    """As `attention`, and the logarithm of each row's softmax denominator.

    **Returns:**

    `(out, lse)`: `out` [*batch, T, H, d]; `lse` [*batch, H, T] in nats, float32 whatever the inputs,
    -inf in rows that see no key. It leaves `sinks` and dropout out, so that attention over
    disjoint sets of keys can be merged by it and a sink added once. Both are differentiable.

    >>> import jax.numpy as jnp, jflash
    >>> q = k = v = jnp.zeros((4, 1, 8))
    >>> jnp.exp(jflash.attention_with_lse(q, k, v, jflash.Causal())[1]).round()
    Array([[1., 2., 3., 4.]], dtype=float32)
    """
    return _attend("attention_with_lse", locals())


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Any = None,
    implementation: str | None = None,
    return_residual: bool = False,
    score_mod: Any = None,
    sinks: ArrayLike | None = None,
    dropout: Dropout | None = None,
    q_positions: ArrayLike | None = None,
    k_positions: ArrayLike | None = None,
    precision: Any = None,
    deterministic: bool = False,
) -> Any:
    """Attention with the arguments and the meaning of `jax.nn.dot_product_attention`, in linear memory.

    A program changes by its import. Unlike `attention`, and like `jax.nn`, positions are aligned
    top-left: query row i stands at i, key row j at j.

    **Arguments:**

    - `query`: [*batch, T, H, D]. `key`: [*batch, t, h, D]. `value`: [*batch, t, h, d] (q, k and v in
      errors). No batch axis counts as one of size 1, which the results lack.
    - `bias`, `mask`: Broadcastable to [*batch, H, T, t], added to the scaled scores or boolean, True
      where a pair takes part. `mask` may be a mask of jflash.
    - `is_causal`: True hides the keys after a query's position.
    - `query_seq_lengths`, `key_value_seq_lengths`: Integers [*batch]. Queries and keys from there on
      are padding.
    - `local_window_size`: (left, right), or a number for both: a query at i sees the keys j with
      i - left <= j <= i + right. None opens a side, in a pair.
    - `implementation`: A name of jflash's, of which `jax.nn` has "xla"; its "cudnn" raises.
    - `return_residual`: True gives (out, lse).
    - `scale`, and from `score_mod` on: As in `attention`. Given positions replace the top-left ones.

    **Returns:**

    `out` [*batch, T, H, d], in the dtype of the inputs; with `return_residual` a tuple of it and
    `lse` [*batch, T, H], float32. Where `jax.nn` gives something else, this is the contract of
    `attention`:

    - A row that sees no key gives 0 and an lse of -inf; there the mean of all values, which hence
      get a gradient, and a large negative number.
    - Padding may hold NaN; there NaN in a value that is hidden spreads.
    - `lse` is differentiable; there it has the dtype of the inputs and no gradient.
    - float32 products are float32 on every platform; there the platform decides.
    - `value` may have another head size.

    **Raises:**

    As `attention`.

    >>> import jax, jax.numpy as jnp, jflash
    >>> x = jnp.ones((2, 8, 4, 64))
    >>> jflash.dot_product_attention(x, x, x, is_causal=True, local_window_size=(3, 0)).shape
    (2, 8, 4, 64)
    """
    call = "dot_product_attention"
    validate.flag(call, "is_causal", is_causal)
    validate.flag(call, "return_residual", return_residual)
    named = dict(query=query, key=key, value=value)
    arrays = [as_array(f"{call}({name}=...)", x) for name, x in named.items()]
    q, k, v = validate.qkv(call, *(x[None] if x.ndim == 3 else x for x in arrays))
    (*batch, T, _, _), t = q.shape, k.shape[-3]

    mask = None if mask is None else as_mask(call, mask)
    if is_causal:
        mask = flags.together(Causal(), mask)
    if local_window_size is not None:
        pair = isinstance(local_window_size, tuple | list)
        size = local_window_size if pair else (local_window_size,) * 2
        mask = flags.together(flags.window(f"{call}(local_window_size=...)", size), mask)
    n, m = query_seq_lengths, key_value_seq_lengths
    n = None if n is None else flags.lengths(f"{call}(query_seq_lengths=...)", n, tuple(batch))
    m = None if m is None else flags.lengths(f"{call}(key_value_seq_lengths=...)", m, tuple(batch))
    mask = flags.together(mask, flags.prefix(n, m, T, t))

    if q_positions is None and T != t:
        if k_positions is None and score_mod is None:
            mask = mask and Moved(mask, t - T)
        else:
            q_positions = jnp.arange(T)
    arguments = dict(
        q=q,
        k=k,
        v=v,
        mask=mask,
        bias=bias,
        scale=scale,
        score_mod=score_mod,
        sinks=sinks,
        dropout=dropout,
        q_positions=q_positions,
        k_positions=k_positions,
        precision=precision,
        deterministic=deterministic,
        implementation=implementation,
    )
    out, lse = _attend(call, arguments)
    out, lse = (x[0] if arrays[0].ndim == 3 else x for x in (out, lse.mT))
    return (out, lse) if return_residual else out


def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    score_mod: Any = None,
    sinks: ArrayLike | None = None,
    dropout: Dropout | None = None,
    q_positions: ArrayLike | None = None,
    k_positions: ArrayLike | None = None,
    precision: Any = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> Float[Array, "N H d"]:
    """Attention within each of the sequences that are packed into one row: no padding is computed.

    Queries of sequence i see keys of sequence i, as far as `mask` shows them. Blocks of pairs that
    no sequence has in common are never loaded, so the cost grows with the visible pairs, and one
    compiled program serves all lengths of the same N and M. `jflash.pack` makes packed rows.

    **Arguments:**

    - `q`: [N, H, D]. `k`: [M, h, D]. `v`: [M, h, d], otherwise as in `attention`.
    - `cu_seqlens_q`: Integers [sequences + 1]: 0, then where each sequence ends in q. Sequences may
      be empty, on either side or both. Rows from `cu_seqlens_q[-1]` on are padding.
    - `cu_seqlens_k`: The same for k and v. None where queries and keys are the same tokens.
    - `mask`: As in `attention`, within each sequence: `Causal()` and `Window` compare positions
      there, `Prefix(n)` shows a sequence's first n keys. An array broadcasts to [H, N, M].
    - `bias`: Broadcasts to [H, N, M]: pairs of different sequences have a place, too.
    - `dropout`: As in `attention`; the rows that it counts are those of q and k.
    - `q_positions`, `k_positions`: Integers [N] and [M]. By default those within the sequence, bottom-right
      aligned: query i at i + (keys of its sequence) - (queries of its sequence), key j at j. Masks and
      score modifiers see them, such as `Alibi`.
    - The others as in `attention`.

    **Returns:**

    `out` [N, H, d]. Padding rows, and rows of a sequence without keys, are 0; what padding holds has
    no effect, and its gradient is 0.

    **Raises:**

    As `attention`; ValueError where offsets do not start at 0, decrease or end beyond the rows. Their
    values are not known inside `jax.jit`, where such offsets give an unspecified result.

    >>> import jax.numpy as jnp, jflash
    >>> q = k = v = jnp.ones((12, 4, 64))
    >>> jflash.varlen_attention(q, k, v, jnp.array([0, 5, 12]), mask=jflash.Causal()).shape
    (12, 4, 64)
    """
    return _attend_packed("varlen_attention", locals())[0]


def varlen_attention_with_lse(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    score_mod: Any = None,
    sinks: ArrayLike | None = None,
    dropout: Dropout | None = None,
    q_positions: ArrayLike | None = None,
    k_positions: ArrayLike | None = None,
    precision: Any = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "N H d"], Float[Array, "H N"]]:
    """As `varlen_attention`, and the logarithm of each row's softmax denominator.

    **Returns:**

    `(out, lse)`: `out` [N, H, d]; `lse` [H, N] as in `attention_with_lse`, -inf in padding rows.

    >>> import jax.numpy as jnp, jflash
    >>> q = k = v = jnp.zeros((4, 1, 8))
    >>> jnp.exp(jflash.varlen_attention_with_lse(q, k, v, jnp.array([0, 1, 4]))[1]).round()
    Array([[1., 3., 3., 3.]], dtype=float32)
    """
    return _attend_packed("varlen_attention_with_lse", locals())


def explain(
    q: ArrayLike | jax.ShapeDtypeStruct,
    k: ArrayLike | jax.ShapeDtypeStruct,
    v: ArrayLike | jax.ShapeDtypeStruct,
    mask: Any = None,
    **kwargs: Any,
) -> backends.Explanation:
    """What `attention` of these arguments would run, how, and for each other implementation why not.

    Takes the arguments of `attention`, where q, k and v may be `jax.ShapeDtypeStruct`, and computes
    nothing. Print the record, or read its fields. Of arrays over several devices it tells who computes
    what; within `jit` this is known for explicit mesh axes only.

    >>> import jax.numpy as jnp, jflash
    >>> x = jnp.ones((1, 1024, 4, 64))
    >>> print(jflash.explain(x, x, x, jflash.Causal()))
    xla on cpu: q (1, 1024, 4, 64), k (1, 1024, 4, 64), v (1, 1024, 4, 64), float32
      config:   Config(block_q=512, block_k=512, scores=2097152)
      schedule: empty blocks are skipped, by arithmetic on the block's index
      derivatives: gradient by xla, forward mode and second order by xla
      not mosaic: it runs on cuda, and this is for cpu
      not triton: it runs on cuda and rocm, or slowly within jflash.interpret(), and this is for cpu
      not reference: dense, T·t memory: never chosen by itself; ask for it by implementation='reference'
    """
    arguments = DEFAULTS | dict(mask=mask) | kwargs
    record = []
    shardings = [None if isinstance(x, Tracer) else getattr(x, "sharding", None) for x in (q, k, v)]

    def trace(q, k, v):
        problem, operands = validate.attention("explain", q, k, v, **arguments)
        explanation = backends.explain(problem, operands, arguments["implementation"])
        sharding = partitioning.describe(operands, shardings)
        record.append(dataclasses.replace(explanation, sharding=sharding))

    jax.eval_shape(trace, q, k, v)
    return record[0]


# The arguments of `attention` that a call may leave out.
DEFAULTS = {
    name: p.default for name, p in inspect.signature(attention).parameters.items() if p.default is not p.empty
}


def _attend(call: str, arguments: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of `attention`, by `call`, which errors name; `arguments` may lack the optional ones."""
    arguments = DEFAULTS | arguments
    problem, operands = validate.attention(call, **arguments)
    row, _ = backends.choose(problem, arguments["implementation"])
    implementation = row.load()
    config = implementation.default_config(problem)
    return rules.attend(rules.Call(problem, implementation, config), operands)


def _attend_packed(call: str, arguments: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """As `_attend`, of the arguments of `varlen_attention`."""
    return _attend(call, packing.in_one_row(call, **arguments))
