"""Programs as JAX stages them: what primitives are, programs inside programs, an evaluator."""
