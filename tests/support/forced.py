"""Lanes that part ways wherever they can, however little a step costs: `divergence="auto"`."""

from batchax.divergence.auto import Auto, Limits

EVERYWHERE = Limits(
    moving=float("inf"), begun=0, busy=0, gain=0, launched=0, nest=0, windows=(3,), devices=1_000
)
FORCED = Auto(limits=EVERYWHERE)
