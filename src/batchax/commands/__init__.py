"""What the command `batchax` can do, a module for each family of its commands."""
