"""Draft providers: who guesses the next tokens of a row."""
