def targets(r): return ""
def answer(r): return []
def as_text(a): return ""
