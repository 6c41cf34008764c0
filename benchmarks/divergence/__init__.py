"""Lanes that part ways: `divergence="compact"` measured against masked lanes and others."""
