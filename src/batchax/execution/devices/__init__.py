"""Where lanes are: the devices of a mesh, the processes that have them, and the way there and back.

To read, in this order: `shards` (which lanes each device has), `mesh` (what the option asks for),
`telling` (what arrays and types say of where lanes are), `placing` (values on their way to
devices), `results` (what shards compute, for all lanes). Of several processes: `processes`,
`meetings`, `calls`, `local_rows`.
"""
