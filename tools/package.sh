#!/bin/sh
# Builds the wheel and the source distribution into dist/, and tries them: what they say of
# themselves, and whether the wheel, installed where nothing else is, does what it is for.
set -e
python=$1
rm -rf dist
"$python" -m hatchling build -d dist
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/tools"
"$place/tools/bin/pip" install --quiet twine
"$place/tools/bin/twine" check --strict dist/*
"$python" -m venv "$place/empty"
"$place/empty/bin/pip" install --quiet dist/*.whl
cd "$place"
empty/bin/batchax --version
empty/bin/python - <<'PYTHON'
import jax
import jax.numpy as jnp

import batchax as bx

# The core of `make demo`: a gradient for each example, in chunks.
loss = lambda w, x: jnp.log1p(jnp.exp(-w @ x))
w, xs = jnp.ones(3), jnp.sin(jnp.arange(300.0)).reshape(100, 3)
gradients = bx.vmap(jax.grad(loss), in_axes=(None, 0), batch_size=7)(w, xs)
assert jnp.allclose(gradients, jnp.stack([jax.grad(loss)(w, x) for x in xs]), atol=1e-6)
print("Installed by itself, it agrees with the loop over examples.")
PYTHON
