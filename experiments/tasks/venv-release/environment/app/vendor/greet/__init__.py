WORDS = "good morning"
