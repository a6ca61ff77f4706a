"""What reaches below Pallas: PTX and Mosaic's own modules, which change between JAX versions.

Each function has a plain twin for Pallas's GPU interpret mode, which knows neither inline assembly nor
products of registers: `plainly()` selects it while a kernel is traced. On hardware these are faster than
what Pallas has names for: accumulators are never zeroed, named barriers cost one instruction a warp, and
masks compare with immediates. H200: docstrings of `forward` and `backward` say how much. One file, though a
long one, so that a new JAX version changes no other.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Literal
from jax.extend.core.primitives import add_jaxvals_p
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

tiling: Any = plgpu.TilingTransform
swizzle: Any = plgpu.SwizzleTransform
inline: Any = plgpu.inline_mgpu  # Any: what it makes of a function has other arguments than the function

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
TILE = plgpu.Layout.WGMMA  # an accumulator: 64 rows, a warpgroup's
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)  # a number for each row of a tile, for each column
SPLAT = plgpu.Layout.WG_SPLAT
SWIZZLED = (tiling((8, 64)), swizzle(128))
OPERAND = plgpu.RefType(SWIZZLED)


_plain = contextvars.ContextVar("plain", default=False)


@contextlib.contextmanager
def plainly(on: bool) -> Iterator[None]:
    """Within it, kernels are traced with the twins."""
    token = _plain.set(on)
    try:
        yield
    finally:
        _plain.reset(token)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(x: float | int) -> ir.Value:
    if isinstance(x, float):
        return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x))
    return arith.constant(_i32(), x)


def _lane(register: ir.Value, n: int) -> ir.Value:
    position = ir.DenseI64ArrayAttr.get([n])
    return vector.extract(register, dynamic_position=[], static_position=position)


def _scalar(register: ir.Value) -> ir.Value:
    return _lane(register, 0) if isinstance(register.type, ir.VectorType) else register


def _first_column() -> ir.Value:
    """Of the columns of an accumulator that this thread holds, two in every eight."""
    return arith.muli(arith.remui(mgpu_utils.thread_idx(), _constant(4)), _constant(2))


def _emit(text: str, constraints: str, *arguments: ir.Value) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(arguments), text, constraints, has_side_effects=True)


# ------------------------------------------------------------------------------------------- barriers
# A barrier between some warpgroups: some arrive, which never waits, others await the last arrival. The twin
# is one of Pallas's barriers, `cell`, that counts warpgroups. Names 0 .. number of warpgroups are Mosaic's.


def arrive(name: Any, threads: int, cell: Any) -> None:
    _named("arrive", name, threads, lambda: plgpu.barrier_arrive(cell))


def sync(name: Any, threads: int, cell: Any) -> None:
    _named("sync", name, threads, lambda: plgpu.barrier_wait(cell))


def _named(operation: str, name: Any, threads: int, twin: Callable) -> None:
    if _plain.get():
        twin()
        return

    @inline(arg_types=(SPLAT,))
    def emit(_, name):
        _emit(f"bar.{operation} $0, {threads};", "r,~{memory}", name.registers[()])

    emit(jnp.asarray(name, jnp.int32))


def meet(name: int, threads: int, cell: Any) -> None:
    """All of several warpgroups arrive, and await each other."""
    _named("sync", name, threads, lambda: (plgpu.barrier_arrive(cell), plgpu.barrier_wait(cell)))


def fence() -> None:
    """Orders this thread's writes of shared memory before later reads by tensor cores and copies."""
    if _plain.get():
        return plgpu.commit_smem()

    @inline()
    def emit(_):
        _emit("fence.proxy.async.shared::cta;", "~{memory}")

    emit()


def any_in_block(flags: jax.Array | None, cells: tuple) -> jax.Array:
    """Whether one of `flags`, int32 [64] of each consumer, is set; those without flags bring None.

    A barrier of all threads of the block. `cells` = (shared int32 [consumers, 64], a barrier that counts
    consumers, the caller's index) for the twin.
    """
    if _plain.get():
        shared, barrier, index = cells
        if flags is not None:
            shared[index] = flags
            plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return shared[...].max() != 0

    def emit(_, *flags):
        flag = _constant(0)
        for register in flags[0].registers.flat if flags else ():
            flag = arith.ori(flag, _scalar(register))
        text = (
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
            "barrier.cta.red.or.pred q, 0, p; selp.s32 $0, 1, 0, q; }"
        )
        found = llvm.inline_asm(_i32(), [flag], text, "=r,r", has_side_effects=True)
        return fa.FragmentedArray.splat(found, (), is_signed=True)

    arguments = () if flags is None else (flags,)
    result = plgpu.ShapeDtypeStruct((), I32, layout=SPLAT)
    return inline(arg_types=(ROW,) * len(arguments), return_type=result)(emit)(*arguments) != 0


def on_warps(*bodies: Callable[[], None]) -> None:
    """Runs each of `bodies` in a warp of its own. The twin: one after the other."""
    if _plain.get():
        for body in bodies:
            body()
        return

    @plgpu.warp_map
    def _(warp):
        for n, body in enumerate(bodies):
            pl.when(warp == n)(body)


def store(shared: Any, ref: Any, inside: Any = None, commit: bool = True) -> None:
    """Starts the copy of a tile to global memory, if it is `inside`; what is behind the array is dropped."""
    if not _plain.get():
        return plgpu.copy_smem_to_gmem(shared, ref, predicate=inside, commit_group=commit)
    copy = lambda: plgpu.copy_smem_to_gmem(shared, ref, commit_group=commit)
    copy() if inside is None else pl.when(inside)(copy)


def add(shared: Any, ref: Any) -> None:
    """Starts the addition of a tile to global memory. The twin writes."""
    plgpu.copy_smem_to_gmem(shared, ref, reduction_op=None if _plain.get() else "add")


# ------------------------------------------------------------------------------------------- products


def _wgmma(acc: list | None, a: Any, b: ir.Value, n: int, kind: str, transposed: tuple) -> list:
    """One wgmma.m64n{n}k16 on float32 registers. Without `acc` it writes instead of adding (scale-d 0)."""
    f32, count = ir.F32Type.get(), n // 2
    constraints = ["=f"] * count + ([] if acc is None else [str(i) for i in range(count)])
    arguments = [] if acc is None else list(acc)
    at = len(constraints)
    if in_registers := isinstance(a, list):
        text_a = "{" + ",".join(f"${at + i}" for i in range(4)) + "}"
        constraints += ["r"] * 4
        arguments += a
    else:
        text_a = f"${at}"
        constraints += ["l"]
        arguments += [a]
    text_b = f"${len(constraints)}"
    constraints += ["l"]
    arguments += [b]
    flags = f"{int(transposed[1])}" if in_registers else f"{int(transposed[0])}, {int(transposed[1])}"
    registers = ",".join(f"${i}" for i in range(count))
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(acc is not None)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{registers}}}, {text_a}, {text_b}, "
        f"p, 1, 1, {flags}; }}"
    )
    out = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        arguments,
        text,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, out, [i]) for i in range(count)]


def _descriptor(ref: ir.Value, group: tuple, left: bool) -> tuple[Callable, bool]:
    """(descriptor of the k-th step of 16, whether the operand lies transposed in shared memory)."""
    (base, step), (_, atom), fastest = mma_utils.create_descriptor(
        ref, swizzle=128, large_tile=(64, 64), group_size=group, logical_k_major=not left
    )
    assert not step[0]
    i64 = ir.IntegerType.get_signless(64)

    def at(k: int) -> ir.Value:
        # Steps of 16 lie within an atom of 64.
        offset = mma_utils.encode_addr((k // 4) * atom) + (k % 4) * (step[1][0] >> 4)
        offset = llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, offset)).result
        return llvm.add(base, offset, overflow_flags=llvm.IntegerOverflowFlags.none)

    return at, fastest != mma_utils.Dim.K


def _tile(registers: list, n: int) -> fa.FragmentedArray:
    layout, one = fa.WGMMA_LAYOUT_ACC_32BIT, ir.VectorType.get((1,), ir.F32Type.get())
    array = np.array([vector.broadcast(one, r) for r in registers], dtype=object)
    array = array.reshape(layout.registers_shape((64, n)))
    return fa.FragmentedArray(_registers=array, _layout=layout, _is_signed=None).to_layout(fa.WGMMA_LAYOUT)


def mma(acc: jax.Array | None, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False):
    """acc + a·b [64, n], float32, asynchronous: a commit group of its own, complete after `wait`.

    `b` is a reference [K, n] in shared memory, `a` one [64, K], or an array in registers; transposed ones
    are [n, K] and [K, 64]. `acc` None: 0.
    """
    n, K = b.shape if transpose_b else b.shape[::-1]
    in_registers = not (hasattr(a, "transforms") or hasattr(jax.typeof(a), "inner_aval"))
    kind = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(b.dtype).name]
    if _plain.get():
        read = lambda x: (x if in_registers and x is a else x[...]).astype(jnp.float32)
        left, right = read(a), read(b)
        left = left.T if transpose_a else left
        right = right.T if transpose_b else right
        y = jnp.dot(left, right, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return y if acc is None else acc + y

    swap = lambda ref, on: mgpu.memref_transpose(ref, (1, 0, 3, 2)) if on else ref

    def emit(_, *operands):
        *acc, a, b = operands
        if in_registers:
            *acc, a = fa.optimization_barrier(*acc, a) if acc else (fa.optimization_barrier(a),)
        elif acc:
            acc: Any = [fa.optimization_barrier(*acc)]
        nvvm.wgmma_fence_aligned()
        b_at, b_transposed = _descriptor(swap(b, transpose_b), (64, n), False)
        if not in_registers:
            a_at, a_transposed = _descriptor(swap(a, transpose_a), (64, 64), True)
        zero = _constant(0)
        total: Any = None
        if acc:
            registers = acc[0].to_layout(fa.WGMMA_LAYOUT_ACC_32BIT).registers.flat
            total = [llvm.extractelement(r, zero) for r in registers]
        for k in range(K // 16):
            if in_registers:
                one = ir.VectorType.get((1,), _i32())
                part = a[:, 16 * k : 16 * k + 16].registers.flat
                left = [llvm.extractelement(vector.bitcast(one, r), zero) for r in part]
                transposed = (None, b_transposed)
            else:
                left, transposed = a_at(k), (a_transposed, b_transposed)
            total = _wgmma(total, left, b_at(k), n, kind, transposed)
        nvvm.wgmma_commit_group_sync_aligned()
        return _tile(total, n)

    types = (*([] if acc is None else [TILE]), TILE if in_registers else OPERAND, OPERAND)
    result = plgpu.ShapeDtypeStruct((64, n), F32, layout=TILE)
    arguments = (*([] if acc is None else [acc]), a, b)
    return inline(arg_types=types, return_type=result)(emit)(*arguments)


def wait(pending: int, *arrays: jax.Array) -> tuple:
    """Until at most `pending` products are in flight.

    Accumulators and register operands of the others may be used only as returned here.
    """
    if _plain.get():
        return arrays
    return _settled(arrays, lambda: nvvm.wgmma_wait_group_sync_aligned(pending))


def settled(*arrays: Any) -> tuple:
    """The arrays, each in registers of its own from here on.

    For accumulators of several products in a row: moved between two of them, they would await the first.
    """
    return arrays if _plain.get() else _settled(arrays, lambda: None)


def _settled(arrays: tuple, first: Callable[[], Any]) -> tuple:
    types = tuple(plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE) for x in arrays)

    @inline(arg_types=(TILE,) * len(arrays), return_type=types)
    def emit(_, *arrays):
        first()
        out = fa.optimization_barrier(*arrays)
        return [out] if len(arrays) == 1 else list(out)

    return tuple(emit(*arrays))


def widened(x: jax.Array) -> jax.Array:
    """[64, n] of 16 bits -> float32. Of bfloat16 by bits: conversions wait for the exponentials' unit."""
    if _plain.get() or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)

    @inline(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE))
    def emit(_, x):
        out = np.empty_like(x.registers)
        one, two = ir.VectorType.get((1,), _i32()), ir.VectorType.get((2,), ir.F32Type.get())
        both = ir.VectorType.get((2,), _i32())
        for index, register in np.ndenumerate(x.registers):
            bits = _lane(vector.bitcast(one, register), 0)
            halves = arith.shli(bits, _constant(16)), arith.andi(bits, _constant(-(1 << 16)))
            pair = vector.from_elements(both, halves)
            out[index] = vector.bitcast(two, pair)
        return fa.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return emit(x)


def pulled(pull: Callable, ds: jax.Array) -> jax.Array:
    """`pull(ds)[0]`, of a `jax.vjp`. It adds cotangents by a primitive that Mosaic does not lower."""

    def evaluated(jaxpr, consts, arguments):
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments)))
        read = lambda x: x.val if isinstance(x, Literal) else values[x]
        for eqn in jaxpr.eqns:
            operands = map(read, eqn.invars)
            if eqn.primitive is add_jaxvals_p:
                results = [jnp.add(*operands)]
            elif "jaxpr" in eqn.params:
                inner = eqn.params["jaxpr"]
                results = evaluated(inner.jaxpr, inner.consts, operands)
            else:
                results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
                results = results if eqn.primitive.multiple_results else [results]
            values.update(zip(eqn.outvars, results))
        return [read(x) for x in jaxpr.outvars]

    closed = jax.make_jaxpr(pull)(ds)
    return evaluated(closed.jaxpr, closed.consts, [ds])[0]


# ------------------------------------------------------------------------------------------- softmax


def partial_sums(p: jax.Array) -> jax.Array:
    """[64, n] -> [64, 8]: each thread adds what it holds, and shuffles once a tile, in the sum over 8."""
    if _plain.get():
        return p.reshape(p.shape[0], -1, 8).sum(1)

    @inline(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct((64, 8), F32, layout=TILE))
    def emit(_, p):
        groups = [p[:, i : i + 8] for i in range(0, p.shape[1], 8)]
        while len(groups) > 1:
            groups = [sum(groups[i + 1 : i + 2], groups[i]) for i in range(0, len(groups), 2)]
        return groups[0]

    return emit(p)


def hide_columns(s: jax.Array, first: jax.Array | None, last: jax.Array | None) -> jax.Array:
    """`s` [64, n] with -inf in the columns before first[row] and behind last[row].

    Both are int32, [64] or the same for all rows, or None.

    Columns are immediates of the comparisons: no tile of indices occupies registers.
    """
    if _plain.get():
        column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
        of_row = lambda x: x[:, None] if x.ndim else x
        if first is not None:
            s = jnp.where(column < of_row(first), -jnp.inf, s)
        return s if last is None else jnp.where(column > of_row(last), -jnp.inf, s)

    bounds = [x for x in (first, last) if x is not None]
    tests = [y for x, y in ((first, "sle"), (last, "sge")) if x is not None]

    @inline(
        arg_types=(TILE, *(ROW if x.ndim else SPLAT for x in bounds)),
        return_type=plgpu.ShapeDtypeStruct(s.shape, F32, layout=TILE),
    )
    def emit(_, s, *bounds):
        lane = _first_column()
        limits = [[arith.subi(_scalar(r), lane) for r in x.registers.flat] for x in bounds]
        out = np.empty_like(s.registers)
        # Register i holds columns 8·(i // 2) + {0, 1} + lane of row half i % 2.
        for i, (index, register) in enumerate(np.ndenumerate(s.registers)):
            for n in range(2):
                value = _lane(s.registers[index], n)
                for limit, test in zip(limits, tests):
                    keep = arith.cmpi(
                        getattr(arith.CmpIPredicate, test), limit[i % len(limit)], _constant(8 * (i // 2) + n)
                    )
                    value = arith.select(keep, value, _constant(-math.inf))
                position = ir.DenseI64ArrayAttr.get([n])
                register = vector.insert(value, register, dynamic_position=[], static_position=position)
            out[index] = register
        return fa.FragmentedArray(_registers=out, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return emit(s, *bounds)


def clear(flags: Any) -> None:
    """Zeros in `flags` [..., n], int32 in shared memory, by one warpgroup."""
    if _plain.get():
        flags[...] = jnp.zeros(flags.shape, jnp.int32)
        return
    n = math.prod(flags.shape)

    @inline(arg_types=(plgpu.RefType(),))
    def emit(_, flags):
        thread = arith.remui(mgpu_utils.thread_idx(), _constant(128))
        for first in range(0, n, 128):
            place = arith.addi(thread, _constant(first))
            text = f"{{ .reg .pred e; setp.lt.u32 e, $1, {n}; @e st.shared.u32 [$0], 0; }}"
            at = arith.addi(_address(flags), arith.muli(place, _constant(4)))
            _emit(text, "r,r,~{memory}", at, place)

    emit(flags)


def mark_columns(flags: Any, s: jax.Array) -> None:
    """Sets flags[column], int32 in shared memory, where a column of `s` [64, n] is not -inf in some row."""
    if _plain.get():
        flags[...] = jnp.maximum(flags[...], jnp.where(s == -jnp.inf, 0, 1).max(0))
        return

    @inline(arg_types=(TILE, plgpu.RefType()))
    def emit(_, s, flags):
        lane = _first_column()
        address = arith.addi(_address(flags), arith.muli(lane, _constant(4)))
        for i, (_, register) in enumerate(np.ndenumerate(s.registers)):
            for n in range(2):
                _emit(
                    "{ .reg .pred p; setp.neu.f32 p, $0, 0fFF800000; "
                    f"@p st.shared.u32 [$1 + {4 * (8 * (i // 2) + n)}], 1; }}",
                    "f,r,~{memory}",
                    _lane(register, n),
                    address,
                )

    emit(s, flags)


def clear_rows(ref: Any, flags: Any) -> None:
    """Zeros in the rows of `ref` [n, D], a swizzled tile, of which no flag [sets, n] is set; unsets all.

    By one warpgroup. A row stays in its place under the swizzle, so that zeros need no permutation.
    """
    n, D = ref.shape
    sets = flags.shape[0]
    if _plain.get():
        ref[...] = jnp.where(flags[...].max(0)[:, None] != 0, ref[...], 0)
        flags[...] = jnp.zeros(flags.shape, jnp.int32)
        return

    @inline(arg_types=(OPERAND, plgpu.RefType()))
    def emit(_, ref, flags):
        thread = arith.remui(mgpu_utils.thread_idx(), _constant(128))
        for first in range(0, n, 128):
            row = arith.addi(thread, _constant(first))
            flag = arith.addi(_address(flags), arith.muli(row, _constant(4)))
            band = arith.muli(arith.divui(row, _constant(8)), _constant(D // 64 * 1024))
            inner = arith.muli(arith.remui(row, _constant(8)), _constant(128))
            address = arith.addi(_address(ref), arith.addi(band, inner))
            zeros = " ".join(
                f"@p st.shared.v4.u32 [$1 + {1024 * atom + 16 * part}], {{z, z, z, z}};"
                for atom in range(D // 64)
                for part in range(8)
            )
            each = " ".join(
                f"@e ld.shared.u32 g, [$0 + {at}]; @e st.shared.u32 [$0 + {at}], z; or.b32 f, f, g;"
                for at in range(0, 4 * n * sets, 4 * n)
            )
            _emit(
                "{ .reg .pred p, e; .reg .u32 f, g, z; mov.u32 z, 0; mov.u32 f, 0; mov.u32 g, 1; "
                f"setp.lt.u32 e, $2, {n}; {each} setp.eq.u32 p, f, 0; {zeros} }}",
                "r,r,r,~{memory}",
                flag,
                address,
                row,
            )

    emit(ref, flags)


def _address(ref: ir.Value) -> ir.Value:
    """Where a reference in shared memory starts, int32."""
    return llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(ref))


def row_numbers(x: int) -> jax.Array:
    """int32 [64]: a number for each row."""
    full = jnp.full((64,), x, jnp.int32)
    return full if _plain.get() else plgpu.layout_cast(full, ROW)


def load(ref: Any, layout: Any, shape: tuple) -> jax.Array:
    """What `ref`, in global memory, holds.

    Not by Pallas's own load: the solver of layouts stops at results that nobody uses.
    """
    if _plain.get():
        return ref[...]

    dtype = ref.dtype

    @inline(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout))
    def emit(_, ref):
        signed = {"i": True, "u": False}.get(jnp.dtype(dtype).kind)
        return fa.FragmentedArray.load_untiled(
            ref, layout=layout.to_mgpu(), is_signed=signed, optimized=False
        )

    return emit(ref)


def index(size: int, layout: Any) -> jax.Array:
    """int32 [size]: 0, 1, ..."""
    if _plain.get():
        return jnp.arange(size, dtype=jnp.int32)

    @inline(return_type=plgpu.ShapeDtypeStruct((size,), I32, layout=layout))
    def emit(_):
        return fa.FragmentedArray.broadcasted_iota(_i32(), (size,), 0, layout.to_mgpu(), is_signed=True)

    return emit()


def across_columns(x: jax.Array, n: int) -> jax.Array:
    """[64], a number for each row -> [64, n]."""
    full = lax.broadcast_in_dim(x, (64, n), [0])
    return full if _plain.get() else plgpu.layout_cast(full, TILE)


def across_rows(x: jax.Array, rows: int) -> jax.Array:
    """[n], a number for each column -> [rows, n]."""
    full = lax.broadcast_in_dim(x, (rows, *x.shape), [1])
    return full if _plain.get() else plgpu.layout_cast(full, TILE)


def tile_of(x: float | int, n: int) -> jax.Array:
    """float32 [64, n]."""
    full = jnp.full((64, n), x, jnp.float32)
    return full if _plain.get() else plgpu.layout_cast(full, TILE)
