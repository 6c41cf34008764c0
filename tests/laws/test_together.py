"""Features two, three and more at a time, next to the loop over examples."""

from itertools import combinations
from pathlib import Path

import jax.numpy as jnp
import pytest

import batchax as bx

from support import together
from support.oracle import same
from support.together import FEATURES, NEEDS, OPTIONS, REFUSED, X

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "together.md"


def named(features):
    return "+".join(f for f in FEATURES if f in features)


ROWS = together.covering_array()


@pytest.mark.parametrize("features", ROWS, ids=named)
@pytest.mark.compiles(150)
@pytest.mark.each_commit(5)
def test_features_together(features):
    same(together.call(features), together.reference(features))


def test_all_pairs_are_together_and_most_triples():
    for size, share in [(2, 1.0), (3, 0.75)]:
        wanted = together.together(size)
        found = {frozenset(c) for row in ROWS for c in combinations(row, size)}
        assert len(found & set(wanted)) >= share * len(wanted)


FEW = together.together(2) + [
    triple for triple in together.together(3) if not any(triple <= row for row in ROWS)
]


@pytest.mark.nightly
@pytest.mark.parametrize("features", FEW, ids=named)
def test_each_pair_alone_and_triples_that_no_call_above_has(features):
    same(together.call(features), together.reference(features))


@pytest.mark.parametrize("features", REFUSED, ids=named)
def test_what_is_refused_says_so(features):
    assert REFUSED[features] in " ".join(str(together.refusal(features)).split())


@pytest.mark.parametrize("feature", NEEDS)
def test_what_has_no_effect_alone_is_refused(feature):
    with pytest.raises(bx.ArgumentTypeError):
        bx.vmap(jnp.sin, **OPTIONS[feature])(X)


def test_the_page_is_as_it_is_made():
    assert PAGE.read_text() == together.page(), "run `make docs`"
