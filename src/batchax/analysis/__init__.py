"""Reading programs: as JAX stages them, and as a compiler made them."""
