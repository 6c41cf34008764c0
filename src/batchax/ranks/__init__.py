"""Functions of known ranks: how ranks are declared, and batch dimensions found."""
