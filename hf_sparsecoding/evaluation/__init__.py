"""How good a prediction is; knows no model and no task."""
