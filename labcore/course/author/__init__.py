"""For authors of notebooks: promotion, rules, running notebooks, the student edition."""
