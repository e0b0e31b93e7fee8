"""Tables, pictures and model cards, from files that commands wrote; no model code."""
