"""Lanes that diverge: loops that some lanes leave early, branches that some take."""
