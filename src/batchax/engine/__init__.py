"""The engine: axes, staging, the interpreter and the table of rules."""
