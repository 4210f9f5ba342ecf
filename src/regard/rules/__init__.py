"""What hides a key, turns a row or has parameters: rules that everything above computes with."""
