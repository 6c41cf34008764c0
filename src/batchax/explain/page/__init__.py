"""The face of an explanation that opens in a browser."""
