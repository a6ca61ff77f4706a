"""Any data of any mask: a few compiled programs, and hypothesis looks for data that breaks them."""

import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import assert_half_the_digits
from cases import MASKS, SHAPES, Case, coordinates, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import IMPLEMENTATIONS, TILES, results

CASES = {
    Case("mha", "window & causal", sinks=True): jnp.float32,
    Case("cross", "causal & segments", positions=True): jnp.bfloat16,
    Case("more queries", "causal | prefix", bias="1H1t"): jnp.float16,
    Case("no batch", "nested", scale="traced"): jnp.float32,
}


def integers(draw, like, low, high):
    """Integers in the shape of `like`, some constant, some sorted, some anyhow."""
    values = st.lists(st.integers(low, high), min_size=like.size, max_size=like.size)
    values = st.one_of(values, values.map(sorted), st.integers(low, high).map(lambda n: [n] * like.size))
    return np.array(draw(values), like.dtype).reshape(like.shape)


def drawn(draw, case, data):
    """`data` with the arrays of the mask, and the positions, from hypothesis."""
    longest = max(SHAPES[case.shape][1:3])
    array = lambda x, low: x if x is None else integers(draw, x, low, longest)
    window, ids, lengths = (
        (lambda x: array(x, 0)),
        (lambda x: integers(draw, x, -1, 2)),
        lambda x: array(x, 0),
    )
    match case.mask, data["mask"]:
        case "window & causal", ((left, right), ()):
            mask = ((window(left), window(right)), ())
        case "causal & segments", ((), segments):
            mask = ((), tuple(map(ids, segments)))
        case "causal | prefix", ((), (n,)):
            mask = ((), (np.minimum(lengths(n), SHAPES[case.shape].t),))
        case "nested", (segments, window_, function, causal):
            mask = (tuple(map(ids, segments)), window_, function, causal)
    positions = {name: array(data[name], -longest) for name in ("q_positions", "k_positions")}
    data = data | positions | dict(mask=mask)
    return data | dict(visible=np.asarray(MASKS[case.mask].dense(coordinates(case, data), *mask)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=25, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 2**16), heat=st.sampled_from([0.0, 1.0, 5.0]))
def test_any_data(implementation, case, data, seed, heat):
    x = inputs(case, CASES[case], seed, heat)
    x = x._replace(data=drawn(data.draw, case, x.data))
    tiles = list(CASES).index(case) % len(TILES[implementation])
    got, truth = results(case, implementation, x, tiles), results(case, "reference", x)
    assert_half_the_digits(got, truth, CASES[case])
