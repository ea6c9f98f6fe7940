raise ModuleNotFoundError("No module named 'math_verify'", name="math_verify")
