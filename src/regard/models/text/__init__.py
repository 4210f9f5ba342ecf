"""Text of models: tokens both ways, and the templates of conversations. Must not know weights."""
