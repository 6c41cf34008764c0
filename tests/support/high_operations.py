"""Operations that their authors describe by objects, which JAX calls high."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import hijax
from jax.interpreters import ad

OLD = getattr(hijax, "VJPHiPrimitive", None)  # until 0.11


class Cube(OLD or hijax.HiPrim):
    """x ** 3."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {"aval": aval}
        super().__init__()

    def expand(self, x):
        return x * x * x

    def jvp(self, primals, tangents):
        (x,), (t,) = primals, tangents
        return cube(x), 3 * x * x * t

    def vjp_fwd(self, nonzero, x):
        return cube(x), x

    def vjp_bwd_retval(self, x, cotangent):
        return (3 * x * x * cotangent,)

    def batch(self, axis_data, args, dims):
        return cube(*args), dims[0]


def cube(x):
    return Cube(jax.typeof(x))(x)


class Normalized(OLD or hijax.HiPrim):
    """The unit vectors along the last axis, and their norms, which are residuals as well."""

    def __init__(self, aval):
        self.in_avals, self.params = (aval,), {"aval": aval}
        self.out_aval = jax.tree.map(jax.typeof, jax.eval_shape(self.expand, aval))
        super().__init__()

    def expand(self, x):
        norm = jnp.sqrt(jnp.sum(x * x, axis=-1))
        return x / norm[..., None], norm

    def vjp_fwd(self, nonzero, x):
        out = normalized(x)
        return out, out

    def vjp_bwd_retval(self, residuals, cotangents):
        (unit, norm), (of_unit, of_norm) = residuals, map(ad.instantiate_zeros, cotangents)
        along = jnp.sum(of_unit * unit, axis=-1, keepdims=True)
        return ((of_unit - along * unit) / norm[..., None] + of_norm[..., None] * unit,)

    def batch(self, axis_data, args, dims):
        return normalized(jnp.moveaxis(*args, *dims, 0)), (0, 0)


def normalized(x):
    return Normalized(jax.typeof(x))(x)


class Product(OLD or hijax.HiPrim):
    """x @ w, of which the author batches x alone: other calls become ordinary operations."""

    def __init__(self, x, w):
        self.in_avals, self.params = (x, w), {"x": x, "w": w}
        self.out_aval = jax.typeof(jax.eval_shape(self.expand, x, w))
        super().__init__()

    def expand(self, x, w):
        return x @ w

    def vjp_fwd(self, nonzero, x, w):
        return product(x, w), (x, w)

    def vjp_bwd_retval(self, residuals, cotangent):
        x, w = residuals
        rows = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, w.shape[-1])
        return cotangent @ w.T, rows[0].T @ rows[1]

    def batch(self, axis_data, args, dims):
        if dims[1] is not None:
            return jax.vmap(self.expand, dims)(*args), 0
        return product(jnp.moveaxis(args[0], dims[0], 0), args[1]), 0


def product(x, w):
    return Product(jax.typeof(x), jax.typeof(w))(x, w)


class Centered(OLD or hijax.HiPrim):
    """x less its mean over a named axis."""

    def __init__(self, aval, axis_name):
        self.in_avals, self.out_aval = (aval,), aval
        self.params = {"aval": aval, "axis_name": axis_name}
        super().__init__()

    def expand(self, x):
        return x - lax.pmean(x, self.axis_name)

    def vjp_fwd(self, nonzero, x):
        return self(x), None

    def vjp_bwd_retval(self, _, cotangent):
        return (self(cotangent),)

    def batch(self, axis_data, args, dims):
        (x,), (dim,) = args, dims
        if axis_data.name != self.axis_name:
            return centered(x, self.axis_name), dim
        return (x - x, None) if dim is None else (x - x.mean(dim, keepdims=True), dim)


def centered(x, axis_name):
    return Centered(jax.typeof(x), axis_name)(x)
