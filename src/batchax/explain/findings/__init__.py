"""What costs more than it would have to: each kind of finding, and what to do about it."""
