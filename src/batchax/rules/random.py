"""Random keys and bits."""
