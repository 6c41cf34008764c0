"""What random programs are made of: expressions, by family, with holes for values.

A hole ``{f}`` takes a value of one kind; ``{f}`` again is the same value, ``{f2}`` another one.

  f any array of floats      s a scalar      v a vector      m a matrix      q a square matrix
  n floats of rank 1 or more      =f floats of the type of the first hole
  i an integer      iv integers in a vector      I any array of integers
  b booleans      c complex numbers      cn of rank 1 or more      k a key      kn keys in a vector
  h floats of 16 and 8 bits      u small or unsigned integers

Values stay of moderate size: whatever could grow is followed by something bounded. Simple
expressions come first in each family: a failing program shrinks towards them. No value is one at
which a derivative is not defined, such as the norm of an empty row: what JAX says there depends on
whether a function returns early for arrays without elements.
"""

ELEMENTWISE = """
-{f}
jnp.sin({f})
jnp.tanh({f})
jnp.abs({f})
{f} * {f}
jnp.exp(-jnp.abs({f}))
{f} + {f2}
{f} - 0.5 * {f2}
jnp.tanh({f} * {f2})
{f} / (1 + {f2} ** 2)
jnp.maximum({f}, {f2})
jnp.arctan2({f}, {f2})
jnp.power(jnp.abs({f}) + 0.5, jnp.tanh({f2}))
jnp.hypot({f}, {f2})
jnp.where({f} > {=f2}, {f}, {=f2})
jnp.where({b}, {f}, 0.5)
lax.clamp(-0.5, {f}, 0.5)
lax.rem({f}, 1.0 + {=f2} ** 2)
jnp.log1p(jnp.abs({f}))
jnp.cbrt({f} ** 2 + 0.1)
jnp.floor({f} * 2)
jnp.sign({f})
lax.erf({f})
lax.lgamma(1 + jnp.abs({f}))
lax.erf_inv(0.9 * jnp.tanh({f}))
jax.nn.relu({f})
jnp.tan(0.5 * jnp.tanh({f}))
jnp.arctanh(0.9 * jnp.tanh({f}))
jnp.logaddexp({f}, {f2})
jnp.nan_to_num({f})
lax.stop_gradient({f}) * {f}
lax.rsqrt(1 + {f} ** 2)
jnp.copysign({f}, {f2})
lax.igamma(1.5 + jnp.abs({s}), jnp.abs({s2}))
jax.scipy.special.xlogy(jnp.abs({f}), 1 + jnp.abs({f2}))
lax.optimization_barrier({f})
lax.reduce_precision({f}, 11, 52)
jnp.frexp({f})[0]
jnp.heaviside({f}, 0.5)
lax.stop_gradient(jnp.nextafter({f}, {=f2}))
jnp.select([{f} > 1, {f} > 0], [{f} * 2, jnp.cos({f})], 0.5)
jnp.ldexp({f}, {i} % 3)
"""

DISCRETE = """
{f}.astype(jnp.bfloat16)
{f}.astype(jnp.float16)
{f}.astype(jnp.float8_e4m3fn)
jnp.round({h}).astype(jnp.int32)
{h} * 2
jnp.sum({h})
{h}.astype(float)
jnp.tanh({h})
{I}.astype(jnp.int8)
{I}.astype(jnp.uint8)
({I} % 7).astype(jnp.int4)
{u} > 1
{u}.astype(jnp.int32)
~{u}
{f} > {f2}
{i} > 1
~{b}
{b} & {b2}
{b} | {b2}
jnp.isfinite({f})
{I} == {i}
{I} + {i}
{I} * 2 - 1
{I} % 3
{I} & 3
lax.population_count({I})
lax.shift_left({I}, jnp.int32(1))
lax.shift_right_logical({I}, jnp.int32(2))
lax.clz({I})
{I}.astype(float)
{b}.astype(jnp.int32)
jnp.clip(jnp.round({f} * 2), -3, 3).astype(jnp.int32)
{I} ** 2 % 5
jnp.where({b}, {i}, 0)
{f}.astype(jnp.float32)
{f} * {i}
lax.bitcast_convert_type({I}, jnp.uint32).astype(jnp.int32)
"""

REDUCTIONS = """
jnp.sum({f})
jnp.sum({n}, 0)
jnp.max({n}, -1)
jnp.mean({n}, 0)
jnp.tanh(jnp.prod({n}, -1))
jnp.argmax({n}, 0)
jnp.argmax({f})
jnp.all({b})
jnp.var({n}, 0)
jax.nn.logsumexp({n}, 0, keepdims=True)
jax.nn.softmax({n}, -1)
jnp.linalg.norm(jnp.append({n} + 2.0, 1.0))
jnp.sum({I})
jnp.quantile({n}, 0.3, axis=-1)
jnp.nanmean(jnp.where({n} > 0, {n}, jnp.nan), -1)
jnp.sum({f}, where={b})
jnp.max({n}, 0, initial=-0.5, where={n} < 1)
jnp.average({v}, weights=jnp.abs({=v2}) + 0.1)
lax.reduce(({v}, {=v2}), (0.0, -9.0), lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0,))[1]
lax.reduce_or({b}, tuple(range({b}.ndim)))
jnp.cov({m})
"""

CONTRACTIONS = """
jnp.tanh({m} @ {v})
jnp.tanh({n} @ {n2})
jnp.dot({v}, {=v2})
jnp.outer({v}, {v2})
jnp.vdot({f}, {=f2})
jnp.einsum("ij,kj->ik", {m}, {m2})
jnp.einsum("ij,k->jik", {m}, {v})
jnp.einsum("i,i,i->i", {v}, {=v2}, {v})
jnp.tensordot({m}, {m2}, ((0,), (0,)))
lax.dot_general({m}, {=m2}, (((1,), (1,)), ((0,), (0,))))
jnp.cross({v}, {=v2})
lax.dot_general({m}, {m2}, (((0,), (0,)), ((), ())), preferred_element_type=float)
jnp.polyval({v}, jnp.tanh({f}))
{I} @ {I2}
jnp.correlate({v}, {v2}, "full")
"""

SHAPES = """
{n}.T
{n}[::-1]
{f}.ravel()
{f}[None]
jnp.concatenate([{v}, {v2}])
jnp.stack([{f}, {=f2}])
jnp.broadcast_to({f}, (2, *{f}.shape))
{n}[1:]
{n}[..., ::2]
jnp.roll({n}, 1, -1)
jnp.tile({n}, 2)[..., :3]
jnp.repeat({n}, 2, 0)[:3]
jnp.pad({v}, (1, 2))
jnp.pad({n}, 1, mode="edge")[..., :3]
lax.pad({v}, 0.5, [(-1, 2, 1)])
jnp.split({n}, [1], -1)[1]
jnp.squeeze({f}[None], 0)
jnp.tril({m})
jnp.diag({v})
jnp.ones_like({n}) * {s}
jnp.eye(3) * {s}
lax.slice({v}, (1,), (2,))
{n}[: {n2}.shape[0]]
jnp.arange(7.0)[: {v}.shape[0]] * {s}
jnp.arange(7.0)[{v}.shape[0] :]
{n}[:0]
jnp.insert({v}, 1, {s})
lax.pad({m}, {s}, [(1, -1, 0), (0, 0, 1)])
lax.broadcast_in_dim({v}, (2, {v}.shape[0]), (1,))
jnp.indices({m}.shape)[1]
jnp.arange(3) * {i}
jnp.linspace({s}, 1.0, 3)
"""

INDEXING = """
{n}[{i}]
{n}.at[{i}].set(0.5)
{n}.at[{i}].add({s})
{n}[{iv}]
{m}[{i}, {i2}]
{m}[jnp.clip({i}, 0, {m}.shape[0] - 1), ::-1]
{n}.at[..., {i}].mul(2.0)
{n}.at[{iv}].add({s})
{v}.at[{iv}].add(jnp.arange(1.0, 1 + {iv}.size))
{n}.at[{iv}].max({s})
{n}.at[{i}].apply(jnp.sin)
{n}.at[{i}].get(mode="fill", fill_value=7.0)
{v}.at[{iv}].mul(1.5, mode="clip")
jnp.take({n}, {iv}, axis=0, mode="wrap")
jnp.take({n}, {I}, axis=0, mode="fill", fill_value=0.0)
jnp.take_along_axis({n}, jnp.argsort({n}, -1), -1)
{v}[{I}]
{m}[{iv}[:, None], {iv}]
{m}.at[{iv}, {iv}].add({s})
{m}.at[:, {i}].set({s})
lax.dynamic_slice_in_dim({n}, {i}, 1)
lax.dynamic_slice({m}, (0, {i}), (2, 1))
lax.dynamic_update_slice({v}, {v}[:2], ({i},))
lax.dynamic_index_in_dim({n}, {i}, keepdims=False)
lax.dynamic_slice({m}, (1, {i}), (1, {m}.shape[1] - 1))
jax.nn.one_hot({i}, 3)
jax.ops.segment_sum({n}[:2], jnp.abs({iv})[:2], 3)
jax.ops.segment_max({v}, jnp.zeros({v}.size, int) + {i}, 3)
jnp.vectorize(lambda a: a.sum() * {s}, signature="(n)->()")({n})
jnp.searchsorted(jnp.sort({v}), {s})
jnp.interp({f}, jnp.arange(3.0), jnp.linspace(1.0, 2.0, 3) ** 2)
jnp.choose({i} % 2, [{f}, -{f}])
lax.select_n({i} % 3, {f}, {f} * 2, jnp.cos({f}))
jnp.nonzero({v} > 0, size=2, fill_value=0)[0]
jnp.unique(jnp.round({v}), size=2, fill_value=0.0)
jnp.histogram({v}, bins=3, range=(-2.0, 2.0))[0]
jnp.piecewise({s}, [{s} > 0], [jnp.sin, jnp.cos])
lax.sort_key_val({v}, jnp.arange({v}.size))[1]
lax.gather({m}, {iv}[:, None], lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, {m}.shape[1]),
    mode="clip")
{n}.at[{iv}].add(1.0, unique_indices=False, indices_are_sorted=False, mode="fill")
{m}.at[{iv}, 0].min({v}[0])
"""

SORTING = """
jnp.sort({n})
jnp.sort({n}, 0, descending=True)
jnp.argsort({v}, descending=True, stable=False)
lax.sort(({v}, {=v2}), num_keys=2)[1]
lax.sort((jnp.round({v}), {=v2}), num_keys=1)[1]
lax.top_k({n}, 1)[0]
lax.top_k({v}, 2)[1]
jnp.lexsort((jnp.round({v}), {=v2}))
jnp.sort({I})
lax.approx_max_k({v}, 2)[0]
lax.top_k({m}, 1, axis=0)[0]
"""

CUMULATIVE = """
jnp.tanh(jnp.cumsum({n}, 0))
jnp.tanh(jnp.cumprod({n}, -1))
lax.cummax({n}, 0)
lax.cummin({n}, {n}.ndim - 1, reverse=True)
lax.cumlogsumexp({v})
lax.associative_scan(jnp.maximum, {n})
jnp.cumsum({I})
lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.tanh({v}), {=v2}))[1]
lax.cumsum({n}, 0, reverse=True) * 0.5
jnp.gradient({v} * 1.0)
"""

# The SVD of JAX 0.12 does not end for a matrix with an infinity, not for one example either.
LINALG = """
jnp.linalg.solve({m} @ {m}.T + 2 * jnp.eye({m}.shape[0]), {m})
jnp.linalg.cholesky({m} @ {m}.T + 2 * jnp.eye({m}.shape[0]))
jnp.linalg.slogdet({q} + 3 * jnp.eye({q}.shape[0]))[1]
jnp.linalg.eigh({m} @ {m}.T + jnp.diag(jnp.arange(1.0 * {m}.shape[0])))[0]
jnp.abs(jnp.linalg.qr({m}.T + jnp.eye({m}.shape[1], {m}.shape[0]) * 2)[1])
jnp.linalg.svd(jnp.clip({m}, -9, 9) + 2 * jnp.eye(*{m}.shape), compute_uv=False)
lax.linalg.triangular_solve({q} + 3 * jnp.eye({q}.shape[0]), {q}, left_side=True, lower=True)
lax.linalg.triangular_solve({q} + 3 * jnp.eye({q}.shape[0]), {q}, left_side=False, lower=False,
    transpose_a=True, unit_diagonal=True) * 0.1
lax.linalg.lu({q} + 3 * jnp.eye({q}.shape[0]))[0]
jnp.tanh(jax.scipy.linalg.expm({q} * 0.2))
jnp.linalg.pinv(jnp.clip({m}, -9, 9) + 2 * jnp.eye(*{m}.shape))
jax.scipy.linalg.cho_solve((jnp.eye({m}.shape[0]) * 2 + jnp.tril({m} @ {m}.T), True), {m})
lax.linalg.tridiagonal_solve(jnp.tanh({v}), 4 + {v} ** 2, jnp.tanh({v}), {v}[:, None])
jnp.linalg.lstsq(
    jnp.clip({m}.T, -9, 9) + 2 * jnp.eye({m}.shape[1], {m}.shape[0]), {m}[0])[0]
jnp.abs(lax.linalg.eigh(jnp.diag(jnp.arange(3.0)) * 2 + 0.1 * jnp.tanh({s}))[1])
jax.scipy.sparse.linalg.cg(lambda u: 3 * u + jnp.tanh({s}) * u.sum() * 0.1, {v}, maxiter=3)[0]
lax.custom_linear_solve(lambda u: u * (2 + {v} ** 2), {=v2}, lambda mv, b: b / (2 + {v} ** 2),
    lambda mv, b: b / (2 + {v} ** 2))
lax.custom_root(lambda u: u ** 3 + u - {s}, 0.0, lambda g, u: lax.fori_loop(0, 8, lambda _,
    w: w - (w ** 3 + w - {s}) / (3 * w ** 2 + 1), u), lambda g, y: y / g(1.0))
lax.linalg.householder_product(jnp.tril({q}, -1) * 0.5, jnp.tanh({q}[0]))
"""

TRANSFORMS = """
jnp.abs(jnp.fft.fft({n}))
jnp.fft.ifft({cn})
jnp.fft.rfft({n})
jnp.fft.irfft({cn})
jnp.real(jnp.fft.fft2({m}))
jnp.real({c})
jnp.abs({c} + 0.1)
{c} * {c} * 0.3
jnp.exp(1j * jnp.tanh({f}))
lax.complex({f}, {=f2})
jnp.angle({c} + 3)
jnp.sum({cn}, 0)
{cn}[::-1]
{c} / (2 + jnp.abs({c}))
jnp.where({b}, {c}, 1j)
{cn}[{i}]
{cn} @ {cn}.T
jnp.vdot({c}, {c}).real
jnp.sqrt({c} * {c} + 3)
jax.scipy.fft.dct({v})
jnp.linalg.solve(jnp.eye({cn}.shape[0]) * (2 + 1j), {cn})
"""

CONVOLUTIONS = """
jnp.convolve({v}, {v2}, "same")
lax.conv_general_dilated({v}[None, None], {v2}[None, None], (1,), "SAME")[0, 0]
lax.conv({m}[None, None], {m2}[None, None], (1, 1), "SAME")[0, 0]
lax.conv_general_dilated({m}[None, None], {q}[None, None], (2, 1), [(1, 1), (0, 2)], (1, 2), (1,
    1))[0, 0]
lax.conv_general_dilated({m}[None], {m2}[:, None], (1,), "SAME",
    feature_group_count={m}.shape[0])[0]
lax.conv_general_dilated({m}[:, None], {m2}[:, None], (1,), "SAME",
    batch_group_count={m}.shape[0])[0]
lax.conv_transpose({m}.T[None], {m2}[:2].T[:, :, None], (2,), "SAME")[0]
lax.conv_general_dilated_patches({m}[None, None], (2, 2), (1, 1), "SAME")[0, 1]
lax.reduce_window({m}, 0.0, lax.add, (2, 2), (1, 1), "SAME") * 0.3
lax.reduce_window({v}, -jnp.inf, lax.max, (2,), (1,), "SAME")
lax.reduce_window({n}, jnp.inf, lax.min, (2,) * {n}.ndim, (1,) * {n}.ndim, "VALID")
lax.reduce_window({v}, 0.0, lax.add, (2,), (2,), ((1, 1),), (1,), (1,))
lax.reduce_window({m}, -jnp.inf, lax.max, (1, 2), (1, 2), "SAME", (2, 1))
lax.reduce_window(jnp.tanh(lax.stop_gradient({v})), 1.0, lax.mul, (2,), (1,), "SAME")
lax.reduce_window({v}, 0.0, lambda a, b: a + 0.5 * b, (1,), (1,), "VALID")
lax.conv_general_dilated({m}[None], {m2}[:, None, :2], (1,), "VALID",
    feature_group_count={m}.shape[0])[0]
"""

RANDOM = """
jax.random.normal({k}, (3,))
jax.random.split({k})[1]
jax.random.fold_in({k}, {i})
jax.random.randint({k}, (), 0, 3)
jax.random.permutation({k}, {n})
jax.random.choice({k}, {v})
jax.random.categorical({k}, {n})
{f} + jax.random.normal({k}, {f}.shape)
jax.random.bernoulli({k}, jax.nn.sigmoid({f}))
jax.random.truncated_normal({k}, {s}, {s} + 1.0)
jax.random.bits({k}, (), jnp.uint32).astype(jnp.int32) % 5
jax.random.choice({k}, {v}, (2,), replace=False)
jax.random.key_data({k}).astype(jnp.int32) % 7
jax.random.wrap_key_data(jax.random.key_data({k}))
jax.random.multivariate_normal({k}, {v}, jnp.eye({v}.size))
jax.random.gamma({k}, 1.5)
jax.random.poisson({k}, 2.0)
jax.random.orthogonal({k}, 2)
jax.random.key({i})
jax.random.split({k}, 3)
{kn}[{i}]
{kn}[::-1]
jax.vmap(jax.random.normal)({kn})
jnp.where({i} > 1, {kn}[0], {kn}[1])
"""

# Where a number may be none, or no number: for data that has such, and branches that avoid it.
RISKY = """
{f} / {f2}
jnp.log({f})
jnp.sqrt({f})
1 / {f}
{f} * jnp.inf
jnp.where({f} > 0, jnp.sqrt({f}), 0.5)
jnp.where({f} == 0, 0.0, {f} / {f})
jnp.arccos({f})
{f} ** 0.5
{f} - {f}
jnp.exp(40 * {f})
jnp.isnan({f})
jnp.nansum({n}, 0)
jnp.nan_to_num({f}, nan=0.5, posinf=2.0, neginf=-2.0)
jnp.linalg.norm({f})
jnp.argmax({n}, -1)
jnp.sort({n}, -1)
{n} / jnp.sum({n})
{f} == {f}
jax.nn.softmax(jnp.where({n} > 0, {n}, -jnp.inf), -1)
"""

# Floats of few digits, and complex numbers.
SMALL = """
{h} + {=h2}
{h} * {h2}
-{h}
jnp.max({h})
jnp.mean({h})
jnp.where({h} > 0, {h}, 0.5)
{h}.astype(jnp.float32)
{h}.astype(jnp.float8_e5m2)
{h}.astype(jnp.bfloat16)
jnp.clip({h}, -3, 3).astype(jnp.int8)
jnp.any({h} > 0)
{u}.astype(jnp.bfloat16)
{u} * {u}
jnp.sort({u}.ravel())
{u}.ravel()[{i}]
jnp.where({u} > 1, {u}, {u} + 1)
{u}.astype(jnp.uint4)
jnp.sum({h} * {h})
jnp.cumsum({h}.ravel())
jnp.sort({h}.ravel())
{h}.ravel()[{i}]
{h}.at[...].add(0.5)
{h}.ravel().at[{i}].add({h}.ravel()[0])
jnp.dot({h}.ravel(), {h}.ravel())
{c} * {c2}
jnp.sum({c})
jnp.tanh({c}.real) * {c}
{c}.astype(jnp.complex64)
jnp.conj({c}) * {c} * 0.2
{c}.ravel().at[{i}].add(1j)
jnp.prod(jnp.tanh({c}.real) + 0.5j)
jnp.dot({c}.ravel(), {c}.ravel()) * 0.3
jnp.exp(1j * {c}.real)
"""

COLLECTIVES = """
lax.psum({f}, "i") * 0.2
lax.pmean({f}, "i")
lax.pmax({f}, "i")
lax.axis_index("i")
lax.all_gather({f}, "i")
lax.all_gather({n}, "i", axis=1)
lax.all_gather({n}, "i", tiled=True)
lax.ppermute({f}, "i", [(0, 1), (1, 2), (2, 0)])
lax.pshuffle({f}, "i", [2, 0, 1, *range(3, lax.axis_size("i"))])
lax.psum({I}, "i") % 5
lax.psum(1, "i") * {f}
lax.psum_scatter(jnp.broadcast_to({f}, (lax.axis_size("i"), *{f}.shape)), "i") * 0.3
lax.all_to_all(jnp.arange(1.0 * lax.axis_size("i")) * {s}, "i", 0, 0)
lax.all_to_all({v}[0] * jnp.ones((lax.axis_size("i"), 2)), "i", 0, 1)
lax.pmax({I}, "i")
{n}[lax.axis_index("i")]
jax.random.fold_in({k}, lax.axis_index("i"))
lax.psum((({f}, {f2})), "i")[1] * 0.1
"""


def read(text):
    """The expressions of a family, one in each line; what is indented continues with a line."""
    return text.strip().replace("\n    ", " ").splitlines()
