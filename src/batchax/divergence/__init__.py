"""Lanes that part ways: loops that some lanes leave early, branches that some take."""
