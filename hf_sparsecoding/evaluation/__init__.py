"""How good a prediction is (`images`), and what a saved model predicts (`predictions`)."""
