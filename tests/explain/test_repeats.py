"""What repeats in a listing is told once, and counted."""

import jax.numpy as jnp
import numpy as np

import batchax as bx
from batchax.explain.wording import Again, fold

from support.explanations import array, equation, layers, line


def kinds(text):
    """An equation for each letter; those of one letter do the same."""
    return [
        equation(str(i + 1), letter, line(1, letter), [array(f"v{i}")], [array(f"v{i + 1}")])
        for i, letter in enumerate(text)
    ]


def told(text):
    """Letters that are listed, and after them how often they are repeated, and how many are."""
    return " ".join(
        f"{e.rounds}x{len(e.like)}" if isinstance(e, Again) else e.primitive
        for e in fold(kinds(text))
    )


def test_what_repeats_is_folded():
    assert told("") == ""
    assert told("abc") == "a b c"
    assert told("aaaa") == "a a a a"  # a fold of three would hardly be shorter
    assert told("aaaaa") == "a 4x1"
    assert told("xababababy") == "x a b 3x2 y"
    assert told("abcdabcd") == "a b c d 1x4"
    assert told("aaaaabaaaaab") == "a 4x1 b 1x6"  # repeats in what repeats
    assert told("abbbbbbcabbbbbbd") == "a b 5x1 c a b 5x1 d"


def test_a_fold_takes_what_its_equations_take_of_others_and_has_all_that_they_give():
    (_, _, again, _) = fold(layers().equations)
    assert again.number == "3"
    assert [v.name for v in again.inputs] == ["v2"]
    assert [v.name for v in again.outputs] == [f"v{k}" for k in range(3, 13)]
    assert again.work.flops == sum(e.work.flops for e in layers().equations[2:12])


def test_the_text_tells_layers_once():
    def network(ws, x):
        for w in ws:
            x = jnp.tanh(w @ x)
            x = x / jnp.sqrt((x * x).sum())
        return x

    ws = [np.ones((32, 32), np.float32)] * 30
    xs = np.ones((8, 32), np.float32)
    explanation = bx.explain(network, (None, 0), compile=False)(ws, xs)
    lines = str(explanation).partition("The program")[2].splitlines()
    assert len(lines) < 20
    assert sum("tanh" in line for line in lines) == 2  # its line, and its equation
    (again,) = [line for line in lines if "  ...  " in line]
    each = len(explanation.equations) // 30
    assert again.startswith(
        f"    ...  29 more times what 1 to {each} do: {each + 1} to {30 * each}, "
    )
    assert "  ws[*]: f32[32,32] (30 of these)" in lines


def test_very_many_arguments_are_not_all_named():
    args = {f"{chr(97 + i)}": np.ones(i + 1, np.float32) for i in range(20)}
    explanation = bx.explain(lambda x, p: x * p["a"][0], (0, None), compile=False)(
        np.ones(3, np.float32), args
    )
    lines = str(explanation).splitlines()
    assert "  p['j']: f32[10]" in lines
    assert "  ... and 10 more; all together 852 B" in lines
