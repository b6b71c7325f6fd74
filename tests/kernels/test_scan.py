"""The gated delta rule and the Mamba-2 recurrence against float64, and in pieces against in one go."""

from __future__ import annotations

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import reference as ref


def delta_inputs(b: int, t: int, hk: int, hv: int, dk: int, dv: int, vector: bool) -> list[mx.array]:
    gate = (b, t, hv, dk) if vector else (b, t, hv)
    return [
        ref.normal(b, t, hk, dk),
        ref.normal(b, t, hk, dk, seed=1) / dk**0.5,
        ref.normal(b, t, hv, dv, seed=2),
        mx.sigmoid(ref.normal(*gate, seed=3)),
        mx.sigmoid(ref.normal(b, t, hv, seed=4)),
        ref.normal(b, hv, dv, dk, seed=5),
    ]


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("dk", [16, 40, 128])
def test_gated_delta(isa: str, vector: bool, dk: int) -> None:
    arrays = delta_inputs(2, 7, 2, 4, dk, 24, vector)
    mask = np.random.default_rng(0).random((2, 7)) > 0.3
    q, k, v, g, beta, state = (ref.f64(a) for a in arrays)
    q, k = np.repeat(q, 2, 2), np.repeat(k, 2, 2)
    ys = []
    for t in range(7):
        decayed = state * (g[:, t, :, None, :] if vector else g[:, t, :, None, None])
        delta = (v[:, t] - (decayed * k[:, t, :, None]).sum(-1)) * beta[:, t, :, None]
        new = decayed + delta[..., None] * k[:, t, :, None]
        live = mask[:, t, None, None, None]
        ys.append((new * q[:, t, :, None]).sum(-1) * live[..., 0])
        state = np.where(live, new, state)
    y, end = kernels.gated_delta(*arrays, mx.array(mask))
    assert ref.error(y, np.stack(ys, 1)) < ref.EXACT
    assert ref.error(end, state) < ref.EXACT


def test_gated_delta_in_pieces(isa: str, threads: int) -> None:
    *steps, state = delta_inputs(2, 9, 2, 2, 64, 16, False)
    whole, end = kernels.gated_delta(*steps, state)
    pieces = []
    for lo, hi in ((0, 1), (1, 6), (6, 9)):
        y, state = kernels.gated_delta(*(a[:, lo:hi] for a in steps), state)
        pieces.append(y)
    assert mx.array_equal(mx.concatenate(pieces, 1), whole)
    assert mx.array_equal(state, end)


def test_ssm(isa: str) -> None:
    b, t, h, p, groups, n = 2, 6, 4, 12, 2, 40
    x, a_log, d = ref.normal(b, t, h, p), ref.normal(h, seed=1), ref.normal(h, seed=2)
    bb, cc = ref.normal(b, t, groups, n, seed=3), ref.normal(b, t, groups, n, seed=4)
    dt, state = mx.sigmoid(ref.normal(b, t, h, seed=5)), ref.normal(b, h, p, n, seed=6)
    mask = np.random.default_rng(0).random((b, t)) > 0.3
    s, ys = ref.f64(state), []
    rb, rc = np.repeat(ref.f64(bb), 2, 2), np.repeat(ref.f64(cc), 2, 2)
    for i in range(t):
        live = mask[:, i, None, None, None]
        step = ref.f64(dt)[:, i, :, None, None]
        new = s * np.exp(-np.exp(ref.f64(a_log))[:, None, None] * step)
        new = new + step * ref.f64(x)[:, i, ..., None] * rb[:, i, :, None]
        s = np.where(live, new, s)
        ys.append((s * rc[:, i, :, None]).sum(-1) + ref.f64(d)[:, None] * ref.f64(x)[:, i])
    y, end = kernels.ssm(x, a_log, bb, cc, d, dt, state, mx.array(mask))
    assert ref.error(y, np.stack(ys, 1)) < ref.EXACT
    assert ref.error(end, s) < ref.EXACT


def test_wrong_shapes_are_errors() -> None:
    *steps, state = delta_inputs(1, 2, 2, 2, 16, 8, False)
    with pytest.raises(ValueError, match="gated_delta"):
        kernels.gated_delta(*steps, state[:, :1])
    with pytest.raises(ValueError, match="gated_delta"):
        kernels.gated_delta(*steps[:3], steps[3][:, :1], steps[4], state)
    with pytest.raises(ValueError, match="scan"):
        kernels.gated_delta(*steps, state, mx.ones((1, 3), mx.bool_))
