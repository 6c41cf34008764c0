"""Explanations made by hand, for tests of the faces that show them."""

from batchax.explain.account import Equation, Finding, Memory, Source, Timing, Value, Work
from batchax.explain.explain import Explanation

HOSTILE = "y = \"</script><b>bold</b>\" + '&amp;' * x"
"""A source line that a careless page would take for markup."""

LANES = 8


def array(name, *shape, axis=0, lanes=LANES):
    """A value of floats; `shape` is that of one example, `axis` where the lanes are."""
    whole = list(shape) if axis is None else [*shape[:axis], lanes, *shape[axis:]]
    size = 4
    for n in whole:
        size *= n
    kind = lambda dims: f"f32[{','.join(map(str, dims))}]"
    return Value(name, kind(shape), kind(whole), axis, size)


def line(number, text, file="/home/me/model.py"):
    """A line of the user."""
    return Source(file, number, text)


def equation(number, primitive, source, inputs, outputs, service="own", **more):
    """An equation that costs as much as its values have numbers, if nothing else is said."""
    moved = sum(v.bytes for v in (*inputs, *outputs))
    more.setdefault("work", Work(moved / 4, moved))
    more.setdefault("emitted", (primitive,))
    more.setdefault("lanes", LANES)
    more.setdefault("rule", {"own": "elementwise", "once": ""}.get(service, service))
    return Equation(number, primitive, source, tuple(inputs), tuple(outputs), service, **more)


def rich(lanes=LANES):
    """A network with a loop in a loop, a branch, each service, findings, memory and timings."""
    m, w, x = array("M", 64, 64, axis=None), array("w", 64, axis=None), array("x", 64)
    a, b, c = array("a", 64, axis=None), array("b", 64), array("c", 64)
    d, e, f = array("d", 64), array("e", 16, 4, axis=1), array("f", 64)
    g, h, i, j = array("g", 64), array("h", 64), array("i"), array("j", 64)
    k, n, o, p = array("k", 64), array("n", 64), array("o", 64), array("p")
    ten = Value("10.0", "f32[]", "f32[]", None, 4, literal=True)
    inner = equation(
        "4.3",
        "scan",
        line(14, "h, _ = lax.scan(inner, h, None, 5)", "/home/me/steps.py"),
        [h],
        [j],
        rule="loops",
        work=Work(51_200.0, 102_400.0),
        times=10,
        role="body",
        parts=(
            equation(
                "4.3.1",
                "sin",
                line(9, "return jnp.sin(h)", "/home/me/steps.py"),
                [h],
                [k],
                times=50,
                role="body",
                work=Work(25_600.0, 102_400.0),
            ),
        ),
    )
    loop = equation(
        "4",
        "while",
        line(21, "x = lax.while_loop(cond, body, x)"),
        [m, c],
        [d],
        rule="loops",
        work=Work(900_000.0, 2_400_000.0),
        times=None,
        notes={"divergence": "masked"},
        parts=(
            equation(
                "4.1",
                "lt",
                line(18, "cond = lambda x: x.max() < 10"),
                [g, ten],
                [i],
                role="condition",
            ),
            equation(
                "4.2",
                "dot_general",
                line(19, "body = lambda x: M @ x"),
                [m, g],
                [h],
                rule="contraction",
                role="body",
                times=None,
                work=Work(800_000.0, 2_000_000.0),
            ),
            inner,
        ),
    )
    branch = equation(
        "7",
        "cond",
        line(25, "y = lax.cond(x.sum() > 0, f, g, x)"),
        [i, f],
        [o],
        rule="branches",
        emitted=("select_n",),
        work=Work(70_000.0, 90_000.0),
        parts=(
            equation("7.1", "exp", line(23, "f = lambda x: jnp.exp(x)"), [f], [n], role="branch 0"),
            equation(
                "7.2",
                "lane_solver",
                line(24, "g = lambda x: solver(x)"),
                [f],
                [n],
                "lanes",
                role="branch 1",
                emitted=("while",),
            ),
        ),
    )
    equations = (
        equation("1", "tanh", line(11, "a = jnp.tanh(w)"), [w], [a], "once", lanes=1),
        equation(
            "2",
            "dot_general",
            line(12, "b = M @ x"),
            [m, x],
            [b],
            rule="contraction",
            work=Work(65_536.0, 20_480.0),
            emitted=("dot_general", "transpose"),
            moves=2048,
        ),
        equation("3", "add", line(12, "b = M @ x"), [b, a], [c], broadcasts=2048),
        loop,
        equation("5", "my_fft", line(22, HOSTILE), [d], [e], "user", rule="my_fft_rule"),
        equation("6", "third_party", line(22, HOSTILE), [e], [f], "jax"),
        branch,
        equation("8", "reduce_sum", line(27, "return y.sum()"), [o], [p], rule="reduction"),
    )
    return Explanation(
        name="network",
        lanes=lanes,
        arguments=(m, w, x),
        outputs=(p, a),
        equations=equations,
        findings=(
            Finding(
                "branch runs for all lanes",
                "Both branches of cond run for all 8 lanes: 70,000 FLOPs, of which one is used.",
                'Pass divergence="compact".',
                "7",
                2e4,
            ),
            Finding(
                "loop waits for its slowest lane",
                "The while loop runs 8 lanes until the last is done.",
                'Pass divergence="compact", or sort the lanes.',
                "4",
                9e5,
            ),
            Finding(
                "sequentially",
                "lane_solver has no batching rule <here>.",
                "Write one with bx.register_rule.",
                "7.2",
                1e3,
            ),
        ),
        memory=Memory(
            peak=40_000,
            arguments=18_688,
            outputs=288,
            temporaries=21_024,
        ),
        outside=Work(0.0, 32.0),
        compiled=Work(90_000.0, 210_000.0),
        options={"batch_size": None, "divergence": "auto", "axis_name": "batch"},
        timings=(
            Timing(1, 8e-3, (7e-3, 1e-2), 20_000),
            Timing(2, 4e-3, (3.8e-3, 4.5e-3), 22_000),
            Timing(4, 2e-3, (1.8e-3, 2.6e-3), 26_000),
            Timing(None, 2.5e-3, (2.4e-3, 2.9e-3), 40_000),
            Timing("loop", 4e-2, (3.5e-2, 5e-2), None),
        ),
    )


def layers(count=6):
    """A network of layers that are alike, each of two equations, and a sum."""
    name = lambda k: array(f"v{k}", 16)
    product, bend = line(3, "x = w @ x"), line(4, "x = jnp.tanh(x)")
    made = [
        equation(
            str(k + 1),
            *(("tanh", bend) if k % 2 else ("dot_general", product)),
            [name(k)],
            [name(k + 1)],
        )
        for k in range(2 * count)
    ]
    total = array("total")
    last = equation(
        str(2 * count + 1), "reduce_sum", line(5, "return x.sum()"), [name(2 * count)], [total]
    )
    return Explanation("layers", LANES, (name(0),), (total,), (*made, last))
