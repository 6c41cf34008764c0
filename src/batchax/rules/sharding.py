"""Sharding annotations and shard_map."""
