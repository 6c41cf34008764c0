"""From what a user calls to flat values with their axes, and back: every check is made here."""
