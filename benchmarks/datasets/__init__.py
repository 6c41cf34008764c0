"""`bx.map` against each of its limits, and against loops that one writes by hand."""
