"""`labcore doctor`: what this machine has, what is missing, what to do."""
