"""How a function is called: with an adapter, or with one that the table and a search make."""
