"""Contractions: dot products, convolutions and Fourier transforms."""
