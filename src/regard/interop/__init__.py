"""At home among neighbours: one module per library, imported only on request."""
