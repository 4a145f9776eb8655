def broken(completions, answer, **columns):
    return [1.0 / (len(a) - len(a)) for a in answer]
