"""Where lanes are: the devices of a mesh, the processes that have them, and the way there and back.

To read, in this order: `shards` (which lanes each device has), `placing` (values move to devices
and results back), `meetings` (what processes agree on), `processes` (arrays and calls of several).
"""
